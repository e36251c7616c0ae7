"""The same trainer on a GPU: what it computes, that the host never waits for it, and the clock."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

import kernels
import train_gpt
from helpers import TOY, run_cli
from test_kernels import two_rows
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


def test_compiled_with_windows_and_documents(train):
    """Rows long enough for flex attention, which only compiled steps use."""
    settings = dict(TRAIN_SEQ_LEN="256", WINDOW_SCHEDULE="200", EVAL_WINDOW="200", MAX_DOC_LEN="256")
    compiled, eager = train(GPU, COMPILE="1", WARMUP_STEPS="2", **settings), train(GPU, **settings)
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
    assert 4000 - 16 * done.result["step_ms"]["p95"] < done.result["train_time_ms"] <= 4000


def gradients(fn, inputs, weight):
    y = fn(*inputs)
    return [y, *torch.autograd.grad((y.float() * weight).sum(), inputs)]


@pytest.mark.parametrize("reach, with_documents", [(200, True), (384, False), (2000, True), (1024, False)])
def test_compiled_attention_equals_the_reference(reach, with_documents):
    """flex attention for windows and documents, cuDNN or another for the whole past: values and gradients,
    with half as many key and value heads."""
    T, draw = 1024, torch.Generator("cuda").manual_seed(0)
    documents = two_rows(T).cuda() if with_documents else None
    shapes = [(2, 4, T, 64), (2, 2, T, 64), (2, 2, T, 64)]
    inputs = [torch.randn(shape, device="cuda", generator=draw, dtype=torch.bfloat16).requires_grad_()
              for shape in shapes]
    weight = torch.randn(shapes[0], device="cuda", generator=draw)

    def fast(q, k, v):
        mask = kernels.gpu_window_mask(train_gpt, reach, T, documents, q.device)
        return kernels.gpu_attention(train_gpt, q, k, v, mask, 0.2)

    def reference(q, k, v):
        mask = train_gpt.window_mask(reach, T, documents, q.device)
        return train_gpt.attention(q, k, v, mask, 0.2)

    exact = gradients(reference, [x.detach().float().requires_grad_() for x in inputs], weight)
    got = gradients(torch.compile(fast, dynamic=False, fullgraph=True), inputs, weight)
    for mine, true in zip(got, exact, strict=True):
        assert (mine - true).norm() < 0.02 * true.norm()


@pytest.mark.parametrize("linear", [train_gpt.linear, kernels.fp8_head])
def test_compiled_loss_equals_the_reference(linear, monkeypatch):
    """Four parts; no more memory than a part's logits take, of which bf16 and some temporaries are left."""
    if linear is kernels.fp8_head and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 here")
    tokens, C, V, draw = 4096, 256, 32768, torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, tokens, C, device="cuda", generator=draw, dtype=torch.bfloat16)
    x = torch.nn.functional.rms_norm(x, (C,)).requires_grad_()
    head = (0.1 * torch.randn(V, C, device="cuda", generator=draw)).requires_grad_()
    targets = torch.randint(V, (1, tokens), device="cuda", generator=draw)
    monkeypatch.setattr(kernels, "LOGITS", tokens * V // 4)
    loss = torch.compile(lambda *args: kernels.gpu_loss(train_gpt, *args), dynamic=False, fullgraph=True)

    def run(fn, product):
        value = fn(x, head, targets, 15.0, product)
        return [value, *torch.autograd.grad(value, (x, head))]

    exact = run(train_gpt.lm_loss, train_gpt.linear)
    run(loss, linear)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = run(loss, linear)
    assert torch.cuda.max_memory_allocated() - before < tokens * V * 4 // 2
    for mine, true in zip(got, exact, strict=True):
        assert (mine - true).norm() < (0.02 if linear is train_gpt.linear else 0.1) * true.norm()


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
