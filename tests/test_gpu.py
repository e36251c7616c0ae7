"""The same trainer on a GPU: what it computes, that the host never waits for it, and the clock."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from helpers import TOY, run_cli
from test_train import losses_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = TOY | dict(
    DEVICE="cuda",
    DTYPE="auto",
    TRAIN_LOG_EVERY="1",
    NUM_KV_HEADS="1",
    VALUE_EMBED_LAYERS="1,0",
    WINDOW_PATTERN="SL",
    WINDOW_SCHEDULE="32",
    SAMPLE_TOKENS="0",
)
CPU = GPU | dict(DEVICE="cpu", DTYPE="float32")
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def root(tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "data").symlink_to(tiny_data / "data")
    return folder


@pytest.fixture
def train(root, monkeypatch, capsys):
    """main() in this process: settings -> code, out, err, losses, result, folder."""
    monkeypatch.chdir(root)

    def go(base, **settings):
        name = f"gpu{next(NUMBERS)}"
        torch.use_deterministic_algorithms(False)  # a run on the CPU turns it on for the whole process
        capsys.readouterr()
        code = train_gpt.main([], base | {"RUN_ID": name} | settings)
        out, err = capsys.readouterr()
        result = root / "logs" / name / "result.json"
        return SimpleNamespace(
            code=code,
            out=out,
            err=err,
            losses=losses_in(out),
            folder=result.parent,
            result=json.loads(result.read_text()) if result.exists() else None,
        )

    yield go
    torch.use_deterministic_algorithms(False)


def near(got, want, tolerance=2e-2):
    assert sorted(got) == sorted(want) == list(range(1, 21))
    assert max(abs(got[step] - want[step]) for step in want) < tolerance


def test_bf16_on_the_gpu_trains_like_fp32_on_the_cpu(train):
    gpu, cpu = train(GPU), train(CPU)
    assert gpu.code == cpu.code == 0, gpu.err
    assert "activations:bfloat16" in gpu.out and "device:cuda" in gpu.out
    assert re.search(r"^peak memory allocated: \d+ MiB reserved: \d+ MiB$", gpu.out, re.M)
    near(gpu.losses, cpu.losses)
    assert gpu.result["val_loss_partial"] == pytest.approx(cpu.result["val_loss_partial"], abs=2e-2)


def test_fp32_on_the_gpu(train):
    """Only Muon's orthogonalisation stays bf16 there."""
    gpu, cpu = train(GPU, DTYPE="float32"), train(CPU)
    assert gpu.code == 0, gpu.err
    near(gpu.losses, cpu.losses, 1e-2)
    assert gpu.losses[1] == pytest.approx(cpu.losses[1], abs=1e-3)


def test_compiled(train):
    compiled, eager = train(GPU, COMPILE="1", WARMUP_STEPS="2"), train(GPU)
    assert compiled.code == 0 and "uncompiled" not in compiled.out, compiled.err
    near(compiled.losses, eager.losses)


@pytest.mark.parametrize("fp8", ["auto-head", "auto-all"])
def test_fp8(fp8, train):
    """Where the GPU can do it: near the same losses as without, and scores that are not quantised."""
    plain, got = train(GPU), train(GPU, FP8=fp8, VAL_LOSS_EVERY="10")
    assert plain.code == got.code == 0, got.err
    can = torch.cuda.get_device_capability() >= (8, 9)
    assert f"fp8: {fp8} is {fp8[5:] if can else 'off'}" in got.out
    assert got.losses == pytest.approx(plain.losses, abs=2e-2) and (got.losses != plain.losses) == can


def test_under_torchrun(train, root):
    """nccl and gloo side by side, one rank."""
    done = run_cli(root, ranks=1, env=GPU | {"RUN_ID": "torchrun"})
    assert done.code == 0, done.err
    near(losses_in(done.out), train(GPU).losses, 5e-3)


@pytest.mark.parametrize("compile", ["0", "1"])
def test_no_synchronisation_between_log_lines(compile, train, monkeypatch):
    """From the start of step 12 to the end of step 19 any wait of the host for the device is an error: steps,
    loader,
    schedules. Steps 1 to 10 and step 20 have a log line."""
    real, count = train_gpt.train_step, itertools.count(1)

    def step(*args):
        n = next(count)
        if n == 12:
            torch.cuda.set_sync_debug_mode("error")
        loss = real(*args)
        if n == 19:
            torch.cuda.set_sync_debug_mode("default")
        return loss

    monkeypatch.setattr(train_gpt, "train_step", step)  # WARMUP_STEPS=0: the rehearsal takes no step
    try:
        done = train(
            GPU,
            COMPILE=compile,
            TRAIN_LOG_EVERY="20",
            BATCH_SCHEDULE="1,2",
            WINDOW_SCHEDULE="32",
            GRAD_CLIP_NORM="1",
            WEIGHT_DECAY="0.1",
            DEVICE_BATCH_SIZE="8",
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert done.code == 0, done.err
    assert next(count) == 21 and sorted(done.losses) == [*range(1, 11), 20]


def test_the_cap(train):
    done = train(
        GPU, ITERATIONS="1000000", MAX_WALLCLOCK_SECONDS="4", TRAIN_LOG_EVERY="200", WARMUP_STEPS="3"
    )
    assert done.code == 0, done.err
    assert done.result["stop_reason"] == "wallclock_cap" and done.result["steps"] > 20
    assert 4000 - 10 * done.result["step_ms"]["p95"] < done.result["train_time_ms"] <= 4000


def test_evaluation_equals_the_cpu(train):
    """The same artifact, in bf16 on the GPU and in fp32 on the CPU."""
    trained = train(GPU, VAL_TOKENS="0")
    assert trained.code == 0, trained.err
    path = str(trained.folder / "final_model.int8.ptz")
    scores = [
        train(
            dict(
                EVAL_FROM=path,
                COMPILE="0",
                SAMPLE_TOKENS="0",
                DATA_FINGERPRINT="",
                DEVICE=device,
                DATA_PATH=TOY["DATA_PATH"],
            )
        ).result
        for device in ("cuda", "cpu")
    ]
    assert scores[0]["val_loss"] == pytest.approx(trained.result["val_loss"], abs=1e-5)
    assert scores[0]["val_loss"] == pytest.approx(scores[1]["val_loss"], abs=1e-2)
    assert scores[0]["val_bpb"] == pytest.approx(scores[1]["val_bpb"], abs=1e-2)


@torch.no_grad()
def test_log_probs_on_the_gpu(train):
    trained = train(GPU)
    models = [
        train_gpt.load_model(trained.folder / "final_model.int8.ptz", device)[0] for device in ("cuda", "cpu")
    ]
    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    got, want = (train_gpt.log_probs(model, tokens.to(model.embed.device)) for model in models)
    assert got.dtype == want.dtype == torch.float32 and got.device.type == "cuda"
    assert (got.cpu() - want).abs().max() < 0.3
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(2, 64, device="cuda"), rtol=0, atol=1e-4)
