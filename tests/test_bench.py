"""tools/dev/bench.py: the training loop, settings and checkouts in turn, step parts, codecs, rooflines."""
import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fork_server
import train_gpt
from helpers import ROOT, TOY, run_cli, slow
from tools.dev import bench

SMALL = ["DEVICE=cpu", "DTYPE=float32", "COMPILE=0", "WARMUP_STEPS=1", "TRAIN_SEQ_LEN=64", "VOCAB_SIZE=512",
         "TRAIN_BATCH_TOKENS=256", "MODEL_DIM=32", "NUM_HEADS=2", "MAX_DOC_LEN=64", "EVAL_CONTEXT=0",
         "WINDOW_BLOCK=32", "EVAL_WINDOW=64", "WINDOW_SCHEDULE=32,64,64,64", "BATCH_SCHEDULE=1,2,2,2",
         "SEQ_SCHEDULE=1,2,2,2"]
SPEEDRUN = ["speedrun", "NUM_LAYERS=5", "WINDOW_PATTERN=0LS-L", *SMALL]
SPEEDRUN_PLUS = ["speedrun_plus", "BIGRAM_ROWS=64", "QK_DIM=12", "DC_WINDOW=7", "PREFIX_WEIGHT=0",
                 "DOC_SCHEDULE=20", *SMALL]
TINY = ["tiny", "BIGRAM_ROWS=256", "COUNT_BITS=12", *SMALL[:8], "WINDOW_SCHEDULE=32,64", "BATCH_SCHEDULE=1,2"]
PARTS = ["attention", "MLP", "head and loss", "optimizer", "the rest"]
OLDER = ROOT / "records/track_tiny/2026-11-22_FastStepsWindows"  # has set_context, imports kernels.py
WITH_SAVER = ROOT / "records/track_tiny/2026-11-26_WordsLongNgrams"  # has recipes


def run_bench(cwd, *words, launch=()):
    done = subprocess.run([fork_server.start(), *launch, str(ROOT / "tools/dev/bench.py"), *words], cwd=cwd,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def toy_folder(tiny_data, monkeypatch):
    monkeypatch.chdir(tiny_data)
    monkeypatch.setattr(bench, "gemm_rate", lambda *_: 1e9)  # takes seconds


def test_the_training_loop(toy_folder, capsys):
    """The shares of a step add up, and a second is as long in every row."""
    bench.step_table(TOY, steps=4, repeats=3)
    _, step, parts, _ = capsys.readouterr().out.splitlines()
    milliseconds, rate = re.match(r"step +([\d.]+) ms \(.*\), ([\d,]+) tok/s", step).groups()
    assert 1024 / float(milliseconds) * 1e3 == pytest.approx(int(rate.replace(",", "")), rel=0.01)
    shares = [float(share) for share in re.findall(r"([\d.]+)%", parts)]
    assert len(shares) == 3 and min(shares) > 0


def test_saving(toy_folder, monkeypatch, capsys):
    """What is timed is the trainer's own checkpoint, of weights and moments."""
    sizes = []
    plain = train_gpt.save_checkpoint

    def counted(run):
        plain(run)
        sizes.append((run.folder / "checkpoint.pt").stat().st_size)

    monkeypatch.setattr(train_gpt, "save_checkpoint", counted)
    bench.saving_table(TOY, repeats=3)
    out = capsys.readouterr().out
    row = re.search(r"^checkpoint +([\d.]+) MiB, ([\d.]+) ms \(longest ([\d.]+)\)", out, re.M)
    size, ms, longest = row.groups()
    assert len(sizes) == 3 and f"{sizes[-1] / 2**20:.1f}" == size and 0 < float(ms) <= float(longest)


@torch._dynamo.config.patch(recompile_limit=8)      # a monkeypatch would leave it hidden
def test_arms_step_in_turn(toy_folder, monkeypatch, capsys):
    """A checkout of an older interface, with a file that it imports, beside this one with two settings."""
    settings = {name: value for name, value in TOY.items() if name in bench.names_of(train_gpt)}
    calls = []
    for name, trainer in (("before", bench.load_trainer(OLDER)), ("after", train_gpt)):
        def counted(*args, name=name, plain=trainer.train_step):
            calls.append(name)
            return plain(*args)
        monkeypatch.setattr(trainer, "train_step", counted)
    arms = [f"before={OLDER}", "after=", "after= TRAIN_BATCH_TOKENS=2048"]
    bench.arms_table(settings, arms, steps=3, skipped=1)
    assert calls[-12:] == ["before", "after", "after"] * 4      # those before are of the warmup
    assert sys.modules["kernels"].__file__ == str(OLDER / "kernels.py") and str(OLDER) not in sys.path
    said, _, first, second, third = capsys.readouterr().out.splitlines()
    assert said.startswith(f"before={OLDER} does not have COUNT_")
    assert "token 1.000 (1.000 to 1.000) of the first" in first and first.endswith(f": before={OLDER}")
    assert second.endswith(": after=") and third.endswith(": after= TRAIN_BATCH_TOKENS=2048")
    for row, tokens in ((second, 1024), (third, 2048)):
        milliseconds, rate = re.match(r" *([\d.]+) ms a step +([\d,]+) tok/s", row).groups()
        assert tokens / float(milliseconds) * 1e3 == pytest.approx(int(rate.replace(",", "")), rel=0.01)


@torch._dynamo.config.patch(recompile_limit=8)
def test_arms_of_the_last_trainer_with_a_saver(toy_folder, capsys):
    """The same recipe on both sides, whose losses agree after the same steps."""
    settings = {name: value for name, value in TOY.items() if name in bench.names_of(train_gpt)}
    trainers = [bench.load_trainer(WITH_SAVER), train_gpt]
    losses = []
    for trainer in trainers:
        known = {name: value for name, value in settings.items() if name in bench.names_of(trainer)}
        run, _ = bench.prepare(known, 4, trainer)
        step = bench.step_function(trainer, run)
        for _ in range(4):
            step(run.loader.next(run.cfg.train_batch_tokens))
        losses.append([value.double().norm().item() for value in run.optimizer.weights().values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) > 20
    bench.arms_table(settings, [f"before={WITH_SAVER}", "after="], steps=2, skipped=1)
    assert capsys.readouterr().out.count(" ms a step ") == 2


@pytest.mark.parametrize("words", [
    ["--saving", "--repeats=0"], ["--arm", "a=", "--steps=1"], ["--repeats=0"]])
def test_too_few_steps_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and "and --repeats 1 at least" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["before=nowhere", "MATRX_LR=0.1", "golf", "after= SAVE"])
def test_refused_arms(text):
    with pytest.raises(train_gpt.Refused):
        bench.read_arm(text)


@pytest.mark.parametrize("settings, ranks", [
    pytest.param(SPEEDRUN_PLUS, 1, id="one rank"), pytest.param(TINY, 1, id="tiny"),
    slow(SPEEDRUN, 2, id="two")])
def test_parts(settings, ranks, tmp_path):
    """A table per stage, on random data of its own; parts add up to the step, ranks talk to each other. Each
    part takes time, tiny's head and loss, too; shares are from 0 to 100 percent; a CPU has no mfu."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    stages = run_bench(tmp_path, "--parts", "--steps=3", *settings, launch=launch).split("\n\n")[1:]
    heads = [re.match(r"(\d+) tokens, window (\d+): ([\d.]+) ms a step, ([\d,]+) tok/s, ([\d,]+) per rank", s)
             for s in stages]
    assert [head[1] + " " + head[2] for head in heads] == ["256 32", "512 64"]
    for stage, head in zip(stages, heads):
        found = re.findall(r"^  (\D+?) +(-?[\d.]+) ms +([\d.-]+)%", stage, re.M)
        rows = {name: float(ms) for name, ms, _ in found}
        shares = {name: float(share) for name, _, share in found}
        assert [*rows] == PARTS + ["communication"] * (ranks > 1)
        assert min([shares[name] for name in PARTS[:-1]]) > 0 and shares["the rest"] >= 0
        assert sum([shares[name] for name in PARTS]) == pytest.approx(100, abs=0.3)
        whole = sum([rows[name] for name in PARTS])
        if more := re.search(r"alone, the parts take ([\d.]+) times as long", stage):
            assert whole / float(head[3]) == pytest.approx(float(more[1]), abs=0.01) and rows["the rest"] == 0
        else:
            assert whole == pytest.approx(float(head[3]), abs=0.02)
        assert (shares.get("communication", 0) > 0) == (ranks > 1) and "mfu" not in stage
        total, each = (float(head[i].replace(",", "")) for i in (4, 5))
        assert total == pytest.approx(ranks * each, rel=0.01)
        assert re.search(r"the loader delivers [\d,]+ tok/s, [\d,.]+ times what its rank consumes", stage)


@pytest.mark.parametrize("card, peak", [
    ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989.4e12),
    ("NVIDIA H100 NVL", 835.5e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4070", 0),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0), ("NVIDIA GB200", 0)])
def test_mfu_is_of_the_card(card, peak, monkeypatch):
    """None for a part of a card, and for one that is not listed."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    assert bench.peak_flops(SimpleNamespace(on_gpu=True)) == peak
    assert bench.peak_flops(SimpleNamespace(on_gpu=False)) == 0


@pytest.mark.slow
def test_codecs(tmp_path, tiny_data):
    """Every rounding with its loss and sizes; the trainer's own artifact is one of them, to the byte."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    done = run_cli(tmp_path, env=TOY | dict(ITERATIONS="30", RUN_ID="a", VAL_TOKENS="0", SAMPLE_TOKENS="0",
                                            ARTIFACT_KEEP="1000", BIGRAM_ROWS="1024", PICTURE="0",
                                            COUNT_ORDERS="0", COUNT_WORDS="0"))      # no text to compress
    assert done.code == 0, done.err
    ours, = re.findall(r"^Serialized model int8\+zlib: (\d+) bytes", done.out, re.M)
    exact, = re.findall(r"^final_int8_zlib_roundtrip_exact .* val_bpb:(\S+)", done.out, re.M)
    out = run_bench(tmp_path, "--codecs", "logs/a/final_model.pt", "ARTIFACT_KEEP=1000",
                    f"DATA_PATH={TOY['DATA_PATH']}", "DATA_FINGERPRINT=")
    rows = {row[:20].strip(): row[20:].replace(",", "").split() for row in out.splitlines()[2:]}
    assert len(rows) == 10
    bpb, lost, zipped, *_ = rows["as the recipe has it"]
    assert float(bpb) == pytest.approx(float(exact), abs=2e-5) and zipped == ours and abs(float(lost)) < 1e-3
    sizes = [[int(n) for n in rows[f"step {step}"][2:6]] for step in (0.1, 0.2, 0.3, 0.4)]
    assert all(a > b for fine, coarse in zip(sizes, sizes[1:]) for a, b in zip(fine, coarse))
    assert all(lc0 < zlib9 for zlib9, _, lc0, _ in sizes)


# ---------- rooflines
RECORDS = [  # settings, tokens, window, milliseconds of a step on eight H100
    (dict(PRESET="golf"), 393_216, 0, 71.47), (dict(PRESET="speedrun"), 131_072, 384, 33.6),
    (dict(PRESET="speedrun"), 262_144, 896, 60.1), (dict(PRESET="speedrun"), 393_216, 1408, 88.1),
    (dict(PRESET="gpt2"), 524_288, 2048, 706.0)]


@pytest.mark.parametrize("settings, tokens, window, record", RECORDS)
def test_no_record_beats_the_roofline(settings, tokens, window, record):
    """And each is within four times of it: what it counts is most of what takes time."""
    cfg = train_gpt.load_config(settings)
    stage = next(stage for stage in cfg.stages() if stage.batch_tokens == tokens)
    assert bench.windows_of(cfg, stage).get("long_window", 0) == window
    parts = bench.roofline(cfg, 8, stage)
    assert record / 4 < 1e3 * sum(parts.values()) < record


def test_the_roofline_by_hand():
    """Two layers of 512, one of which sees 64 tokens before its own: FLOPs over rates, part by part."""
    cfg = train_gpt.load_config(dict(
        PRESET="gpt2", DEPTH="0", TARGET_PARAM_DATA_RATIO="0", NUM_LAYERS="2", MODEL_DIM="512", NUM_HEADS="8",
        NUM_KV_HEADS="4", MLP_MULT="2", WINDOW_PATTERN="SL", WINDOW_SCHEDULE="128", VOCAB_SIZE="1024",
        TRAIN_SEQ_LEN="1024", TRAIN_BATCH_TOKENS="65536", FP8="off"))
    stage, = cfg.stages()
    one, eight = (bench.roofline(cfg, gpus, stage) for gpus in (1, 8))
    assert one["communication"] == 0
    assert one["blocks"] == pytest.approx(6 * 2 * 1_835_008 * 65_536 / bench.MATMUL)
    assert one["head"] == pytest.approx(6 * 512 * 1024 * 65_536 / bench.MATMUL)
    seen = sum(min(i + 1, reach + 1) for reach in (64, 128) for i in range(1024)) / 1024
    assert one["attention"] == pytest.approx(12 * 512 * seen * 65_536 / bench.MATMUL)
    for name in ("blocks", "head", "attention", "activations", "optimizer"):
        assert one[name] == pytest.approx(8 * eight[name])
    parameters = train_gpt.parameter_counts(cfg).total()
    assert eight["communication"] == pytest.approx(8 * parameters * 7 / 8 / bench.LINK)
    muon = sum(5 * (4 * short * short * long + 2 * short**3) for short, long in 2 * [
        (512, 512), (256, 512), (256, 512), (512, 512), (512, 1024), (512, 1024)])
    assert bench.orthogonalization_flops(cfg) == muon
    fast = bench.roofline(dataclasses.replace(cfg, fp8="all"), 1, stage)
    assert fast["blocks"] == one["blocks"] * bench.MATMUL / bench.MATMUL_FP8


def test_the_roofline_of_each_stage():
    """For one GPU and for eight."""
    rows = [re.search(r"(\d) H200, tokens:(\d+) long_window:(\d+) ms .* step:([\d.]+) tok/s per GPU:(\d+) ",
                      line).groups() for line in bench.rooflines({}, "speedrun")]
    stages = [("131072", "384"), ("262144", "896"), ("393216", "1408"), ("393216", "1664")]
    assert [row[:3] for row in rows] == [(gpus, *stage) for gpus in "18" for stage in stages]
    for gpus, tokens, _, step, speed in rows:
        assert int(tokens) / int(gpus) / float(step) * 1e3 == pytest.approx(int(speed), rel=1e-3)
