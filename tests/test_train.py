"""Whole runs on the toy data: ranks, micro-batches, seeds, the clock and its cap, and what goes wrong."""

import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import GOLF_RECORD, SCRIPT, TOY, run_cli, toy_config, write_shard

# 20 steps, half of them with a double batch and longer windows; a loss at every one
STEPS = TOY | dict(
    NUM_KV_HEADS="1",
    VALUE_EMBED_LAYERS="1,0",
    WINDOW_PATTERN="SL",
    WINDOW_SCHEDULE="16,64",
    BATCH_SCHEDULE="1,2",
    TRAIN_LOG_EVERY="1",
    VAL_TOKENS="1500",
    SAMPLE_TOKENS="0",
    VAL_LOSS_EVERY="10",
)
NUMBERS = itertools.count()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def root(tiny_data, tmp_path_factory):
    """A folder to run in, with data/."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "data").symlink_to(tiny_data / "data")
    return folder


def losses_in(text):
    """{step: train_loss} of a log or a terminal."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step:(\d+)/\d+ train_loss:(\S+)", text, re.M)
    }


@pytest.fixture
def train(root, monkeypatch, capsys):
    """main() in this process, beside data/: settings -> code, out, err, losses, result, weights, log."""
    monkeypatch.chdir(root)

    def go(base=STEPS, **settings):
        name = f"run{next(NUMBERS)}"
        capsys.readouterr()
        code = train_gpt.main([], base | {"RUN_ID": name} | settings)
        out, err = capsys.readouterr()
        folder = root / "logs" / name
        read = lambda file: (folder / file).read_bytes() if (folder / file).exists() else None  # noqa: E731
        log = (read("train.log") or b"").decode().rpartition("=" * 100 + "\n")[2]
        return SimpleNamespace(
            code=code,
            out=out,
            err=err,
            folder=folder,
            losses=losses_in(log),
            log=log,
            result=json.loads(read("result.json") or "null"),
            weights=read("final_model.pt"),
            artifact=read("final_model.int8.ptz"),
        )

    return go


def slow_steps(monkeypatch, seconds):
    """Makes training steps last seconds(step, rows) or their own time if longer -> LR factors used."""
    real, used = train_gpt.train_step, []

    def step(loss_fn, optimizer, batch, micro, lr, momentum):
        end = time.perf_counter() + seconds(len(used) + 1, len(batch[0]))
        loss = real(loss_fn, optimizer, batch, micro, lr, momentum)
        used.append(lr)
        time.sleep(max(0.0, end - time.perf_counter()))
        return loss

    monkeypatch.setattr(train_gpt, "train_step", step)
    return used


def same_losses(got, want, steps=20):
    """To 1e-4 at every step; the lines have four decimals."""
    assert sorted(got) == sorted(want) == list(range(1, steps + 1))
    assert max(abs(got[step] - want[step]) for step in want) < 1.01e-4


# -------------------------------------------------------------------------------- ranks and micro-batches
@pytest.fixture(scope="module")
def alone(root):
    """The 20 steps on one rank, through the command line."""
    done = run_cli(root, env=STEPS | {"RUN_ID": "alone"})
    assert done.code == 0, done.err
    return SimpleNamespace(losses=losses_in(done.out), out=done.out, folder=root / "logs/alone")


def test_one_rank(alone):
    assert alone.losses[1] == pytest.approx(np.log(512), abs=1e-3) and alone.losses[20] < alone.losses[1] - 1
    result = json.loads((alone.folder / "result.json").read_text())
    assert result["tokens"] == 10 * 1024 + 10 * 2048


def test_two_ranks_agree_with_one(alone, root):
    done = run_cli(root, ranks=2, env=STEPS | {"RUN_ID": "two"})
    assert done.code == 0, done.err
    same_losses(losses_in(done.out), alone.losses)
    score = [re.findall(r"_exact val_loss_partial:(\S+)", out)[0] for out in (done.out, alone.out)]
    assert float(score[0]) == pytest.approx(float(score[1]), abs=1e-4)
    assert json.loads((root / "logs/two/result.json").read_text())["world_size"] == 2
    assert len(re.findall(r"^step:20/20 train_loss", done.out, re.M)) == 1  # only rank 0 speaks


def test_micro_batches_agree_with_one_batch(alone, train):
    done = train(DEVICE_BATCH_SIZE="4")
    assert done.code == 0 and "grad_accum_steps:4" in done.out
    same_losses(done.losses, alone.losses)


def test_two_nodes_agree_with_one(alone, root, tmp_path):
    """Two torchruns of one rank each, which meet on this host but share no folder, as two hosts would not."""
    shutil.copytree(root / "data", tmp_path / "data")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = (
        {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        | STEPS
        | {"OMP_NUM_THREADS": "1", "RUN_ID": "nodes"}
    )
    jobs = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                f"--node-rank={node}",
                "--nproc_per_node=1",
                "--rdzv-backend=c10d",
                "--rdzv-id=test",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--rdzv-conf=is_host={int(node == 0)}",
                "--local-addr=127.0.0.1",
                str(SCRIPT),
            ],
            cwd=(root, tmp_path)[node],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        texts = [job.communicate(timeout=90) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], texts
    same_losses(losses_in(texts[0][0] + texts[1][0]), alone.losses)
    assert "val_loss" not in min(texts, key=lambda text: len(text[0]))[0]
    written = [folder / "logs/nodes/result.json" for folder in (root, tmp_path)]
    assert sum(path.exists() for path in written) == 1, "rank 0's host has the run folder, the other none"


def test_every_rank_scores_the_artifact(root):
    """Not the weights it trained: two ranks print what one prints for the file. Wide enough for int8 rows."""
    wide = TOY | {"MODEL_DIM": "160", "ITERATIONS": "4", "EMBED_LR": "3", "VAL_BATCH_SIZE": "512"}
    exact = r"(?m)^final_int8_zlib_roundtrip_exact val_loss_partial:(\S+)$"
    two = run_cli(root, ranks=2, env=wide | {"RUN_ID": "wide"})
    one = run_cli(root, env=wide | {"EVAL_FROM": "logs/wide/final_model.int8.ptz", "RUN_ID": "wide_again"})
    assert two.code == one.code == 0, two.err + one.err
    scores = [float(re.search(exact, run.out)[1]) for run in (two, one)]
    trained = json.loads((root / "logs/wide/result.json").read_text())["trained"]["val_loss"]
    assert abs(trained - scores[1]) > 1e-5, "else the test proves nothing"
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_three_ranks_share_six_sequences(train, root):
    """A world size that is no power of two, on as many sequences as it divides."""
    six = dict(TRAIN_BATCH_TOKENS="384", ITERATIONS="12")
    done = run_cli(root, ranks=3, env=STEPS | six | {"RUN_ID": "three"})
    assert done.code == 0, done.err
    same_losses(losses_in(done.out), train(**six).losses, 12)


# As FACTS has it; only what makes it small and what names the toy data differs
GOLF = """PRESET=golf VOCAB_SIZE=1024 NUM_LAYERS=9 MODEL_DIM=512 NUM_HEADS=8 NUM_KV_HEADS=4 MLP_MULT=2
    TIE_EMBEDDINGS=1 TRAIN_SEQ_LEN=4096 TRAIN_BATCH_TOKENS=393216 TIED_EMBED_LR=0.030 MATRIX_LR=0.020
    SCALAR_LR=0.020 MUON_MOMENTUM=0.99
    MUON_MOMENTUM_WARMUP_STEPS=1500 MUON_MOMENTUM_WARMUP_START=0.92 WARMDOWN_ITERS=3000 ITERATIONS=20000
    MAX_WALLCLOCK_SECONDS=600 SEED=1337 RUN_ID=golf DATA_PATH=./data/datasets/fineweb10B_sp1024
    TOKENIZER_PATH=./data/tokenizers/fineweb_1024_bpe.model"""
SCALED = dict(
    VOCAB_SIZE="512",
    MODEL_DIM="64",
    TRAIN_SEQ_LEN="64",
    TRAIN_BATCH_TOKENS="512",
    ITERATIONS="8",
    DATA_PATH="./data/datasets/toy",
    TOKENIZER_PATH="./data/tokenizers/toy.model",
    COMPILE="0",
    DEVICE="cpu",
    DTYPE="float32",
    WARMUP_STEPS="2",
    SAMPLE_TOKENS="8",
)


def test_golf_command_line(train, root):
    """The record's environment, scaled down, on one rank and on two."""
    line = GOLF_RECORD | dict(word.split("=") for word in GOLF.split()) | SCALED
    one = train(line)
    assert one.code == 0, one.err
    two = run_cli(root, ranks=2, env=line | {"RUN_ID": "golf2"})
    assert two.code == 0, two.err
    same_losses(losses_in(two.out), one.losses, 8)
    bpb = [
        float(re.findall(r"^final_int8_zlib_roundtrip_exact val_loss:\S+ val_bpb:(\S+)$", out, re.M)[0])
        for out in (one.out, two.out)
    ]
    assert bpb[0] == pytest.approx(bpb[1], abs=1e-4)
    assert one.result["val_bpb"] == pytest.approx(bpb[0], abs=1e-8) and one.result["preset"] == "golf"
    assert one.result["artifact_within_limit"] is True and "16000000 bytes, within it" in one.out
    assert set(one.result["overrides"]) == {"run_id"} | {
        name.lower() for name in (*SCALED, *GOLF_RECORD)
    }  # the rest is the preset


# The whole preset; only what makes it small and what names the toy data differs
SPEEDRUN = dict(
    PRESET="speedrun",
    DATA_PATH="data/datasets/toy",
    VOCAB_SIZE="512",
    MODEL_DIM="96",
    BIGRAM_ROWS="512",
    TRAIN_SEQ_LEN="128",
    TRAIN_BATCH_TOKENS="512",
    MAX_DOC_LEN="96",
    WINDOW_SCHEDULE="16,32,48,56",
    WINDOW_BLOCK="8",
    EVAL_WINDOW="96",
    ITERATIONS="9",
    EXTENSION_ITERATIONS="2",
    MUON_MOMENTUM_WARMUP_STEPS="3",
    MUON_MOMENTUM_COOLDOWN_STEPS="2",
    WARMUP_STEPS="0",
    VAL_TOKENS="1500",
    TRAIN_LOG_EVERY="1",
    COMPILE="0",
    DEVICE="cpu",
    DTYPE="float32",
    SAMPLE_TOKENS="0",
)


def test_speedrun_scaled_down(train, root, monkeypatch):
    """All stages, the extension and the final window, the same on one rank, on two, in micro-batches, and to
    the bit after a rehearsal of every stage."""
    windows, set_context = [], train_gpt.GPT.set_context

    def spy(self, T, window, *wanted):
        windows.append(window)
        set_context(self, T, window, *wanted)

    monkeypatch.setattr(train_gpt.GPT, "set_context", spy)
    one = train(SPEEDRUN)
    assert one.code == 0, one.err
    assert windows[:4] == [16, 32, 48, 56]  # the rehearsal
    assert [*dict.fromkeys(windows[4:])][:6] == [96, 16, 32, 48, 56]  # a first score, the run, the last ones
    assert one.result["tokens"] == 512 * (3 * 1 + 3 * 2 + 3 * 3 + 2 * 3) and one.result["steps"] == 11
    assert one.losses[11] < one.losses[1] - 0.5
    assert re.search(r"^documents: \d+ in \d+ rows; of 300000 train tokens \d+ are read", one.out, re.M)
    assert "eval_window:96" in one.out and one.result["eval"]["eval_window"] == 96
    for settings in (dict(DEVICE_BATCH_SIZE="1"), dict(WARMUP_STEPS="5")):
        other = train(SPEEDRUN, **settings)
        assert other.code == 0, other.err
        same_losses(other.losses, one.losses, 11)
    assert other.weights == one.weights and other.losses == one.losses
    two = run_cli(root, ranks=2, env=SPEEDRUN | {"RUN_ID": "speedrun2"})
    assert two.code == 0, two.err
    same_losses(losses_in(two.out), one.losses, 11)
    scores = [re.findall(r"_exact val_loss_partial:(\S+)", run.out) for run in (one, two)]
    scores = [[float(score) for score in found] for found in scores]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and len(scores[0]) == 2


# -------------------------------------------------------------------------------- the same again
def test_same_seed_same_bits(train):
    """Neither another run nor the rehearsal before the clock changes a bit; another seed does."""
    runs = [train(**kw) for kw in ({}, dict(WARMUP_STEPS="5"), dict(SEED="1338"), dict(WARMUP_STEPS="0"))]
    assert all(run.code == 0 for run in runs)
    assert runs[0].weights == runs[1].weights == runs[3].weights != runs[2].weights
    assert runs[0].artifact == runs[1].artifact == runs[3].artifact
    assert runs[0].losses == runs[1].losses == runs[3].losses
    assert runs[0].result["val_loss_partial"] == runs[1].result["val_loss_partial"]


def test_compiled_runs_are_the_same_bits(alone, train):
    """... on two threads, whose race for the embedding's gradient shows at this size unless Team forbids it,
    and train like the uncompiled one. The only test that waits for the compiler."""
    small = dict(COMPILE="1", BATCH_SCHEDULE="1", WINDOW_SCHEDULE="0", ITERATIONS="12", WARMUP_STEPS="1",
                 NUM_LAYERS="1", MODEL_DIM="128", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="4096",
                 EVAL_CONTEXT="64")
    torch.set_num_threads(2)
    torch._dynamo.reset()
    runs = [train(**small) for _ in range(2)]
    torch._dynamo.reset()
    assert all(run.code == 0 and "training uncompiled" not in run.out for run in runs), runs[0].out
    assert runs[0].weights == runs[1].weights and runs[0].losses == runs[1].losses
    assert runs[0].result["val_loss_partial"] == runs[1].result["val_loss_partial"]
    same_losses(runs[0].losses, train(**small | {"COMPILE": "0"}).losses, 12)
    torch.set_num_threads(1)


def test_rehearsal_leaves_no_trace(tiny_data):
    """Model, optimizer, rotary tables, windows, loader and every random generator, to the bit."""
    cfg = toy_config(
        tiny_data,
        vocab_size=512,
        warmup_steps=3,
        window_schedule=(16,),
        window_pattern="SL",
        value_embed_layers=(1,),
        weight_decay=0.1,
        num_kv_heads=1,
        normuon_beta2=0.9,
        adam_every=2,
        max_doc_len=20,
    )
    team = train_gpt.Team(cfg, {})
    data = train_gpt.open_data(cfg)
    loader = train_gpt.Loader(cfg, data, team)
    model = train_gpt.GPT(cfg, team.dtype)
    train_gpt.init_parameters(model, cfg.seed)
    optimizer = train_gpt.Optimizer(model, cfg)
    model.set_context(cfg.train_seq_len, 16)

    def step():
        train_gpt.train_step(model, optimizer, loader.next(cfg.train_batch_tokens), 16, 1.0, 0.9)

    def state():
        return [
            *optimizer.tensors(),
            *model.parameters(),
            *model.rope,
            *model.buffers(),
            torch.get_rng_state(),
            torch.tensor([optimizer.step_count, loader.position, model.scale, *model.reach.values()]),
        ]

    for _ in range(4):  # until no momentum or second moment is zero
        step()
    optimizer.step_count = 0  # rehearse resets that of a fresh optimizer
    assert all(t.any() for bank in optimizer.banks for t in (bank.data, *bank.state))
    before = [t.clone() for t in state()]
    draws = random.getstate(), np.random.get_state()[1].tolist()
    assert train_gpt.rehearse(cfg, team, model, optimizer, 16, lambda line, **kw: None) is model
    for kept, now in zip(before, state(), strict=True):
        assert torch.equal(kept, now)
    assert draws == (random.getstate(), np.random.get_state()[1].tolist())
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.abs().max() == 0, name


# -------------------------------------------------------------------------------- the clock
CLOCK = TOY | dict(SAMPLE_TOKENS="0", VAL_TOKENS="500", TRAIN_BATCH_TOKENS="128", ITERATIONS="100000")


@pytest.mark.parametrize("slowdown", [1, 3, 10])
def test_the_cap(slowdown, train, monkeypatch):
    """Slower hardware gets fewer steps, not more time: the run ends within two steps before the cap."""
    cap, lap = 2.7, 0.05 * slowdown
    factors = slow_steps(monkeypatch, lambda step, rows: lap)
    done = train(CLOCK, MAX_WALLCLOCK_SECONDS=str(cap), WARMDOWN_ITERS="3000", VAL_LOSS_EVERY="3")
    assert done.code == 0 and done.result["stop_reason"] == "wallclock_cap"
    seconds, steps = done.result["train_time_ms"] / 1e3, done.result["steps"]
    assert cap - 2 * max(lap, done.result["step_ms"]["p95"] / 1e3) < seconds <= cap
    assert steps == len(factors) and seconds / steps >= lap
    (line,) = re.findall(r"^stopping_early: .*$", done.out, re.M)
    assert (
        line
        == f"stopping_early: wallclock_cap train_time:{done.result['train_time_ms']}ms step:{steps}/100000"
    )
    # the LR is whole for half of the budget, whatever the hardware; then it falls towards 0
    half = [factor for i, factor in enumerate(factors) if i * seconds / steps < 0.48 * cap]
    assert len(half) >= 2 and set(half) == {1.0}
    assert factors == sorted(factors, reverse=True) and factors[-1] < 2.5 * lap / (cap / 2)


def test_the_cap_with_larger_batches(train, monkeypatch):
    """The last stage's steps take three times as long, and are expected to from the first one on."""
    cap, lap = 2.0, 0.1
    factors = slow_steps(monkeypatch, lambda step, rows: lap * rows / 2)
    done = train(CLOCK, MAX_WALLCLOCK_SECONDS=str(cap), BATCH_SCHEDULE="1,3", WARMDOWN_FRAC="0.1",
                 BATCH_LR_POWER="1")
    assert done.code == 0 and done.result["stop_reason"] == "wallclock_cap"
    seconds, steps = done.result["train_time_ms"] / 1e3, done.result["steps"]
    assert cap - 2 * max(3 * lap, done.result["step_ms"]["p95"] / 1e3) < seconds <= cap
    assert {1.0, 3.0} <= set(factors) and factors.count(1.0) > factors.count(3.0) > 0
    assert done.result["tokens"] > 128 * steps


def test_a_slow_step_counts(train, monkeypatch):
    slow_steps(monkeypatch, lambda step, rows: 2.0 * (step == 5))
    done = train(CLOCK, ITERATIONS="8")
    assert done.code == 0 and done.result["train_time_ms"] >= 2000 and done.result["step_ms"]["max"] >= 2000


def test_a_slow_validation_does_not(train, monkeypatch):
    real, calls = train_gpt.evaluate, []

    def evaluate(*args, **kw):
        calls.append(time.sleep(2.0 if len(calls) == 1 else 0))
        return real(*args, **kw)

    monkeypatch.setattr(train_gpt, "evaluate", evaluate)
    done = train(CLOCK, ITERATIONS="8", VAL_LOSS_EVERY="4", MAX_WALLCLOCK_SECONDS="60")
    assert done.code == 0 and len(calls) == 4  # steps 0, 4, 8, and the artifact
    assert done.result["train_time_ms"] < 1500 and done.result["step_ms"]["max"] < 1500
    assert [int(step) for step in re.findall(r"^step:(\d+)/8 val_loss", done.out, re.M)] == [0, 4, 8]


# -------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("kind", ["weights", "one loss"])
def test_a_loss_that_is_not_finite_stops_the_run(kind, train, monkeypatch):
    """Within one logging interval, also if only a single step between two lines was hit."""
    real, count = train_gpt.train_step, itertools.count(1)

    def step(loss_fn, optimizer, *rest):
        loss, n = real(loss_fn, optimizer, *rest), next(count)
        if n == 12 and kind == "weights":
            optimizer.banks[0].data.fill_(float("inf"))
        return loss * float("nan") if n == 12 and kind == "one loss" else loss

    monkeypatch.setattr(train_gpt, "train_step", step)
    done = train(TOY, TRAIN_LOG_EVERY="5", ITERATIONS="40", SAMPLE_TOKENS="0")
    assert done.code == 1 and done.result is None and next(count) == 16  # it ended at step 15
    last = done.log.strip().splitlines()[-1]
    assert "not finite at step 15" in last
    assert last in done.err and "Traceback" not in done.err


def memory_for(monkeypatch, sequences):
    """A model that runs out of memory with more than so many sequences at a time."""
    real = train_gpt.GPT.forward

    def forward(self, tokens, targets):
        if len(tokens) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, tokens, targets)

    monkeypatch.setattr(train_gpt.GPT, "forward", forward)


def test_the_micro_batch_is_what_fits_in_memory(alone, train, monkeypatch):
    """By the estimate that the plan prints: with room for 5 sequences, 4 of the 16 at a time."""
    cfg = train_gpt.replace(train_gpt.load_config(STEPS), vocab_size=512)
    monkeypatch.setattr(train_gpt, "free_memory", lambda team: train_gpt.step_memory(cfg, team, 5) + 1)
    memory_for(monkeypatch, 5)
    done = train()
    assert done.code == 0 and "grad_accum_steps:4" in done.out and done.result["micro_batch"] == 4
    assert re.search(r"^world_size:.* micro_batch:4x64 .* memory:\d+ MiB \(estimate\)$", done.out, re.M)
    same_losses(done.losses, alone.losses)


@pytest.mark.parametrize(
    "fits, world_size, asked, micro",
    [
        (99, 1, 0, 12),  # the whole share of a rank
        (99, 2, 0, 6),
        (11, 1, 0, 6),  # the largest divisor that fits
        (5, 1, 0, 4),
        (5, 4, 0, 3),
        (1, 1, 0, 1),
        (0, 1, 0, 1),  # one sequence at least, whatever the estimate
        (99, 1, 5, 4),  # device_batch_size is obeyed, as far as it divides
        (1, 1, 6, 6),  # ... whatever the estimate
        (99, 3, 99, 4),
    ],
)
def test_micro_batch(fits, world_size, asked, micro, monkeypatch):
    cfg = train_gpt.replace(
        train_gpt.load_config(TOY), vocab_size=512, train_batch_tokens=12 * 64, device_batch_size=asked
    )
    team = SimpleNamespace(world_size=world_size, ranks_here=world_size, on_gpu=False, dtype=torch.float32)
    needs = [train_gpt.step_memory(cfg, team, n) for n in range(13)]
    assert 0 < needs[0] and needs[12] - needs[0] == pytest.approx(12 * (needs[1] - needs[0]), abs=12)
    assert needs[1] > needs[0]
    monkeypatch.setattr(train_gpt, "free_memory", lambda team: train_gpt.step_memory(cfg, team, fits) + 1)
    assert train_gpt.micro_batch(cfg, team) == micro


def test_free_memory_is_shared_by_the_ranks_of_a_host():
    one, four = (
        train_gpt.free_memory(SimpleNamespace(on_gpu=False, ranks_here=ranks)) for ranks in (1, 4)
    )
    assert 2**27 < one < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") and four == one / 4


def test_too_little_memory_for_one_sequence(train, monkeypatch):
    memory_for(monkeypatch, 0)
    done = train()
    assert done.code == 1 and done.result is None
    assert "out of memory" in done.err and len(done.err.strip().splitlines()) == 1


def test_without_a_compiler(alone, root, tmp_path):
    """One line, and it trains uncompiled."""
    done = run_cli(
        root,
        env=STEPS
        | {
            "COMPILE": "1",
            "CXX": "/nonexistent",
            "RUN_ID": "no_compiler",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        },
    )
    assert done.code == 0, done.err
    assert len(re.findall(r"^.*(?:compile: not possible|uncompiled).*$", done.out, re.M)) == 1
    assert "Traceback" not in done.err
    same_losses(losses_in(done.out), alone.losses)


def test_without_matplotlib(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = train(ITERATIONS="2")
    assert done.code == 0 and done.result["steps"] == 2 and not (done.folder / "loss.png").exists()
    assert len(re.findall(r"^loss\.png: .*matplotlib", done.out, re.M)) == 1


def test_epochs_wrap(train, tmp_path):
    """3,000 tokens, 1,024 a step: the data begins again, a line each. No tokenizer: no bpb, with a line."""
    rng = np.random.default_rng(0)
    for split, size in (("train_000000", 1700), ("train_000001", 1300), ("val_000000", 400)):
        write_shard(tmp_path / f"foreign_{split}.bin", rng.integers(0, 90, size))
    done = train(TOY, DATA_PATH=str(tmp_path), VOCAB_SIZE="100", VAL_TOKENS="0", ITERATIONS="9")
    assert done.code == 0, done.err
    line = r"^epoch (\d+) begins in step (\d+): all (\d+) train sequences were read$"
    wraps = re.findall(line, done.out, re.M)
    assert wraps == [("2", "3", "46"), ("3", "6", "46"), ("4", "9", "46")]  # 2,999 targets in rows of 64
    assert done.result["val_bpb"] is None and done.result["val_loss"] > 0
    assert re.search(r"no tokenizer.*null", done.out)


def test_batch_schedule(train):
    """A batch schedule changes the tokens of a step, not its shapes: 3 stages of 4 steps each."""
    done = train(
        BATCH_SCHEDULE="1,2,3",
        WINDOW_SCHEDULE="64",
        ITERATIONS="12",
        TRAIN_BATCH_TOKENS="256",
        BATCH_LR_POWER="0.5",
    )
    assert done.code == 0 and done.result["tokens"] == 4 * 256 * (1 + 2 + 3)
    assert train(BATCH_SCHEDULE="1,2,3").code == 2  # two windows: no common stages
    extended = train(
        BATCH_SCHEDULE="1,2,3", WINDOW_SCHEDULE="64", ITERATIONS="8", EXTENSION_ITERATIONS="3",
        TRAIN_BATCH_TOKENS="256", VAL_LOSS_EVERY="0"
    )
    assert extended.code == 0 and extended.result["tokens"] == 256 * (4 * 1 + 4 * 2 + 3 * 3)
    assert extended.result["steps"] == 11 and "step:11/11 val_loss" in extended.out
