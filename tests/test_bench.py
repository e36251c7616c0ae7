"""bench --parts, whose figures on a GPU are the project's proof of speed: what it prints, and by ranks; bench
--loader and --codecs."""
import re
import subprocess
import sys

import pytest

from helpers import ROOT, TOY, run_cli

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


def test_codecs(tmp_path, tiny_data):
    """Every rounding with its loss and sizes; the trainer's own artifact is one of them, to the byte."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    env = TOY | dict(ITERATIONS="30", RUN_ID="a", VAL_TOKENS="0", SAMPLE_TOKENS="0", ARTIFACT_KEEP="1000",
                     BIGRAM_ROWS="1024")
    done = run_cli(tmp_path, env=env)
    assert done.code == 0, done.err
    ours, = re.findall(r"^Serialized model int8\+zlib: (\d+) bytes", done.out, re.M)
    exact, = re.findall(r"^final_int8_zlib_roundtrip_exact .* val_bpb:(\S+)", done.out, re.M)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/bench.py"), "--codecs", "logs/a/final_model.pt",
         "ARTIFACT_KEEP=1000", f"DATA_PATH={TOY['DATA_PATH']}", "DATA_FINGERPRINT="],
        capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row[:20].strip(): row[20:].replace(",", "").split() for row in done.stdout.splitlines()[2:]}
    assert len(rows) == 15
    bpb, lost, zipped, *_ = rows["int8, clipped rows"]
    assert float(bpb) == pytest.approx(float(exact), abs=2e-5) and zipped == ours and abs(float(lost)) < 1e-3
    for kind in ("alike", "by group"):
        sizes = [[int(n) for n in rows[f"step {step}, {kind}"][2:6]] for step in (0.1, 0.2, 0.3, 0.4)]
        assert all(a > b for fine, coarse in zip(sizes, sizes[1:]) for a, b in zip(fine, coarse))
        assert all(lc0 < zlib9 for zlib9, _, lc0, _ in sizes)
