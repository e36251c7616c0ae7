"""bench --parts, whose figures on a GPU are the project's proof of speed: what it prints, and by ranks."""
import re
import subprocess
import sys

import pytest

from helpers import ROOT

SETTINGS = ["DEVICE=cpu", "DTYPE=float32", "COMPILE=0", "WARMUP_STEPS=1", "TRAIN_SEQ_LEN=64", "NUM_LAYERS=3",
            "TRAIN_BATCH_TOKENS=256", "MODEL_DIM=32", "BIGRAM_ROWS=64", "VOCAB_SIZE=512", "MAX_DOC_LEN=64",
            "WINDOW_PATTERN=LS0", "WINDOW_SCHEDULE=32,64", "BATCH_SCHEDULE=1,2", "EVAL_WINDOW=64"]
PARTS = ["attention", "MLP", "head and loss", "optimizer", "the rest", "communication", "host"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts(ranks, tmp_path):
    """A table per stage, on random data of its own; parts add up to the step, ranks talk to each other."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run([*launch, str(ROOT / "tests/bench.py"), "--parts", "--steps=3", *SETTINGS],
                          capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stages = done.stdout.split("\n\n")[1:]
    heads = [re.match(r"(\d+) tokens, window (\d+): ([\d.]+) ms a step, ([\d,]+) tok/s, ([\d,]+) per rank", s)
             for s in stages]
    assert [head[1] + " " + head[2] for head in heads] == ["256 32", "512 64"]
    for stage, head in zip(stages, heads):
        rows = {name.strip(): float(ms) for name, ms in re.findall(r"^  (\D+?) +(-?[\d.]+) ms", stage, re.M)}
        assert [*rows] == PARTS
        assert sum([*rows.values()][:-2]) == pytest.approx(float(head[3]), abs=0.02)
        assert min(rows[name] for name in PARTS[:3]) > 0 and (rows["communication"] > 0) == (ranks > 1)
        total, each = (float(head[i].replace(",", "")) for i in (4, 5))
        assert total == pytest.approx(ranks * each, rel=0.01)
        assert re.search(r"the loader delivers [\d,]+ tok/s, [\d,.]+ times what its rank consumes", stage)


@pytest.mark.parametrize("preset", ["golf", "speedrun"])
def test_loader(preset, tmp_path):
    """Rows of a preset, with and without documents, from random shards of its own."""
    command = [sys.executable, str(ROOT / "tests/bench.py"), "--loader", "--steps=2", "--repeats=2"]
    done = subprocess.run([*command, f"PRESET={preset}"], capture_output=True, text=True, timeout=300,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(rf"{preset}: (\d+) rows of (\d+) at a time, ([\d,]+) tok/s", done.stdout)
    rows, tokens, rate = found.groups()
    assert int(rows) * int(tokens) == 65_536 and int(rate.replace(",", "")) > 100_000
