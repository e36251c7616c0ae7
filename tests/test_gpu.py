"""The same trainer on a GPU: what it computes, and that the host never waits for it.

`./run.sh test -m gpu` needs a GPU. Tests marked structure are about waits, memory, compiling and the clock,
not about numbers; `./run.sh test -m static` runs them also on the stand-in for an H100 (stand_in.py), which
computes nothing, and some of the others on the emulated GPU (emulate_gpu.py), which does.
"""

import itertools
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import exact as exact_numbers
import train_gpt
from helpers import TOY, look, run_cli, toy_of
from test_kernels import gradients, two_rows
from tools.gpu import parts as gpu_parts
from tools.gpu import stand_in
from tools.gpu.subject import Report, Subject
from train_gpt import preset_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# a string, which pytest evaluates when the test runs: an import starts no CUDA
needs_fp8 = pytest.mark.skipif(
    "torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)", reason="no fp8 here")

ON_GPU = dict(DEVICE="cuda", DTYPE="auto", TRAIN_LOG_EVERY="1")
GPU = TOY | ON_GPU | dict(VALUE_EMBED_LAYERS="1,0", WINDOW_PATTERN="SL", WINDOW_SCHEDULE="32")
CPU = GPU | dict(DEVICE="cpu", DTYPE="float32")
# Documents, windows and Adam at every other step; the fourth stage, an extension, is left out
SPEEDRUN = toy_of("speedrun", **ON_GPU, SEQ_SCHEDULE="1", EXTENSION_ITERATIONS="0", MAX_EPOCHS="0",
                  STAGE_STARTS="0,0.25,0.5,1", MAX_DOC_LEN="128", WINDOW_BLOCK="8", WINDOW_SCHEDULE="32",
                  EVAL_WINDOW="32", EVAL_CONTEXT="128", FP8="off")
GPT2 = toy_of("gpt2", **ON_GPU, DEPTH="0", TARGET_PARAM_DATA_RATIO="0", CORE="0", FP8="off")
COMPILED = dict(COMPILE="1", WARMUP_STEPS="2")
# Its scores repeat by counts, which the stand-in leaves as they come
NO_MIXTURE = dict(MIXTURE="0")


@pytest.fixture(autouse=True, scope="module")
def on_the_stand_in():
    """Nothing can launch there: fused attention only allocates, or all results are computed by the CPU. Toys
    of 512 tokens run loss_kernel, too."""
    train_gpt.LEAST_KERNEL_VOCABULARY = 0
    if "STATIC_COMPUTES" in os.environ:
        from tools.gpu import emulate_gpu
        from tools.gpu import interpret_kernels  # needs Triton

        operators = emulate_gpu.Operators()
        interpreter = interpret_kernels.Interpreter()
        with interpreter.in_place_of_the_gpu():
            yield operators
        assert not interpreter.faults, interpreter.faults
    else:
        yield stand_in.replace_attention(torch, lambda *_: None) if "STATIC_NAME" in os.environ else None


@pytest.fixture(autouse=True)
def nondeterministic():
    """A run on the CPU turns deterministic algorithms on for the whole process."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def after_warmup(monkeypatch):
    """after_warmup(step): training's steps are made by that function, warmup's by the trainer's own."""
    real = train_gpt.train

    def of_training(step):
        def train(run):
            monkeypatch.setattr(train_gpt, "train_step", step)
            return real(run)

        monkeypatch.setattr(train_gpt, "train", train)

    return of_training


def near(got, want, tolerance=2e-2):
    assert sorted(got.losses) == sorted(want.losses) == list(range(1, 21))
    assert got.losses == pytest.approx(want.losses, abs=tolerance)


# ------------------------------------------------------------ runs
@pytest.mark.parametrize("dtype, tolerance", [("auto", 2e-2), ("float32", 1e-2)])
def test_the_gpu_trains_like_fp32_on_the_cpu(dtype, tolerance, train):
    """In fp32 only Muon's orthogonalization stays bf16 there."""
    gpu = train(GPU, DTYPE=dtype)
    cpu = train(CPU)
    assert gpu.code == cpu.code == 0, gpu.err
    assert "MiB" in gpu.result["peak_memory"]
    near(gpu, cpu, tolerance)
    assert gpu.result["val_loss_partial"] == pytest.approx(cpu.result["val_loss_partial"], abs=2e-2)


@pytest.mark.parametrize("settings", [
    GPU, SPEEDRUN | dict(TRAIN_SEQ_LEN="256", WINDOW_SCHEDULE="200", EVAL_WINDOW="200", MAX_DOC_LEN="256",
                         EVAL_CONTEXT="256")], ids=["tiny", "speedrun"])
def test_compiled(settings, train):
    """Also with rows long enough for flex attention, which only compiled steps use."""
    compiled = train(settings, **COMPILED)
    eager = train(settings)
    assert compiled.code == 0, compiled.err
    near(compiled, eager)


@pytest.mark.parametrize("settings, fp8", [(SPEEDRUN, "auto-head"), (GPT2, "auto-all")],
                         ids=["speedrun", "gpt2"])
def test_fp8(settings, fp8, train):
    """Where the GPU can do it: near the same losses as without, but not the same."""
    plain = train(settings)
    got = train(settings, FP8=fp8, VAL_LOSS_EVERY="10")
    assert plain.code == got.code == 0, got.err
    near(got, plain)
    assert (got.losses != plain.losses) == (torch.cuda.get_device_capability() >= (8, 9))


def test_under_torchrun(train, root):
    """nccl and gloo side by side, one rank."""
    done = run_cli(root, ranks=1, env=GPU | {"RUN_ID": "torchrun"})
    assert done.code == 0, done.err
    near(look(root / "logs" / "torchrun"), train(GPU), 5e-3)


@pytest.mark.structure
@pytest.mark.parametrize("settings, compile", [(GPU | NO_MIXTURE | dict(BATCH_SCHEDULE="1,2"), "0"), (
    SPEEDRUN | dict(BATCH_SCHEDULE="1,1,2,2"), "1")], ids=["tiny", "speedrun, compiled"])
def test_no_synchronisation_between_log_lines(settings, compile, train, after_warmup):
    """From the start of step 12 to the end of step 19 any wait of the host for the device is an error: steps,
    loader, schedules. Steps 1 to 10 and step 20 have a log line; the last stage begins before."""
    real = train_gpt.train_step
    count = itertools.count(1)

    def step(*args):
        n = next(count)
        if n == 12:
            torch.cuda.set_sync_debug_mode("error")
        loss = real(*args)
        if n == 19:
            torch.cuda.set_sync_debug_mode("default")
        return loss

    after_warmup(step)
    try:
        done = train(settings, COMPILE=compile, TRAIN_LOG_EVERY="20", GRAD_CLIP_NORM="1",
                     DEVICE_BATCH_SIZE="8")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert done.code == 0, done.err
    assert next(count) == 21 and sorted(done.losses) == [*range(1, 11), 20]


@pytest.mark.structure
def test_nothing_compiles_on_the_clock(train, after_warmup):
    """Not for a stage, a window, a validation in between, or the last batch of val, which is shorter."""
    real = train_gpt.train_step
    compiled = []

    def step(*args):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        loss = real(*args)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
        return loss

    after_warmup(step)
    done = train(SPEEDRUN, **COMPILED, TRAIN_SEQ_LEN="128", WINDOW_SCHEDULE="32,32,64,64",
                 BATCH_SCHEDULE="1,1,2,2", VAL_LOSS_EVERY="4", FP8="auto-head")
    assert done.code == 0, done.err
    assert compiled == [0] * 20 and torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


# ------------------------------------------------------------ kernels
@pytest.mark.parametrize("window, with_documents", [(200, True), (384, False), (2000, True), (1022, False),
                                                    (1023, False), (1024, False)])
def test_compiled_attention_equals_the_reference(window, with_documents):
    """flex attention for windows and documents, flash attention for the whole past: values and gradients,
    with half as many key and value heads."""
    T = 1024
    draw = torch.Generator("cuda").manual_seed(0)
    documents = two_rows(T).cuda() if with_documents else None
    kind = dict(device="cuda", generator=draw, dtype=torch.bfloat16, requires_grad=True)
    inputs = [torch.randn(2, heads, T, 64, **kind) for heads in (4, 2, 2)]

    limit = torch.tensor(window, device="cuda") if with_documents or window < T - 1 else window

    def fast(q, k, v, limit):
        mask = train_gpt.gpu_window_mask(limit, T, documents, q.device)
        return train_gpt.gpu_attention(q * 0.2, k, v, mask)

    exact = [x.detach().float().requires_grad_() for x in inputs]
    mask = train_gpt.window_mask(window, T, documents, exact[0].device)
    want = gradients(train_gpt.attention(exact[0] * 0.2, *exact[1:], mask), exact)
    got = gradients(torch.compile(fast, dynamic=False, fullgraph=True)(*inputs, limit), inputs)
    for mine, true in zip(got, want, strict=True):
        assert (mine - true).norm() < 0.02 * true.norm()


@needs_fp8
def test_compiled_fp8_of_speedrun_plus_equals_the_cpu():
    """The MLP with delayed scales, and queries, keys and values at once: outputs and gradients."""
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(256, 128, generator=draw).bfloat16() for _ in range(2))
    fc, proj = (0.1 * torch.randn(*shape, generator=draw) for shape in ((512, 128), (128, 512)))
    matrices = [0.1 * torch.randn(rows, 128, generator=draw) for rows in (96, 96, 128)]
    by_kernel = partial(train_gpt.fp8_mlp, transpose=train_gpt.kernel_transpose)
    cases = [(train_gpt.fp8_mlp, by_kernel, [x, fc, proj, train_gpt.DelayedScales(1).values[0]], [grad]),
             (train_gpt.fp8_qkv, train_gpt.fp8_qkv, [x, *matrices, torch.tensor([0.7])],
              [0.1 * torch.randn(256, rows, generator=draw).bfloat16() for rows in (96, 96, 128)])]
    for function, fast, inputs, grads in cases:
        found = []
        compiled = torch.compile(fast, dynamic=False, fullgraph=True)
        for device, fn in (("cpu", function), ("cuda", compiled)):
            there = [t.detach().to(device) for t in inputs]
            if fast is by_kernel:
                # as DelayedScales has them
                there[-1] = torch.empty(3, 4, device=device)[:, 0].copy_(there[-1])
            there = [t.requires_grad_() for t in there]
            outputs = fn(*there)
            outputs = [outputs] if torch.is_tensor(outputs) else [*outputs]
            given = torch.autograd.grad(outputs, there, [g.to(device) for g in grads])
            found.append([t.detach().float().cpu() for t in (*outputs, *given)])
        for exact, mine in zip(*found, strict=True):
            assert (mine - exact).norm() < 0.02 * exact.norm(), function.__name__


# ------------------------------------------------------------ at real size, against fp32 in slices
FLEX = dict(window=train_gpt.gpu_window, window_mask=train_gpt.gpu_window_mask,
            attention=train_gpt.gpu_attention)


@pytest.fixture
def measured():
    """A function of exact.py at the size of one rank of eight, on these kernels -> its verdicts."""
    report = Report(None)
    subject = Subject(train_gpt, report, {}, False)

    def go(function, *args, fp8="off", **kernels):
        cfg = replace(preset_config("speedrun"), fp8=fp8)
        team = train_gpt.Team(train_gpt.load_config({}), {})
        model = SimpleNamespace(kernels=train_gpt.Kernels(**kernels))
        run = SimpleNamespace(team=team, cfg=cfg, model=model)
        function(subject, run, *args)
        return [(row["verdict"], row["text"]) for row in report.rows]

    return go


@pytest.mark.parametrize("heads, T, width, window", [(6, 49_152, 128, 1408), (6, 49_152, 128, 640),
                                                     (3, 98_304, 128, 640), (6, 49_152, 128, 49_152)])
def test_flex_attention_at_real_size(heads, T, width, window, measured):
    """Rows of speedrun's third stage with its windows, paired heads, and no window but documents."""
    shape = (1, heads, T, width)
    draw = torch.Generator("cuda").manual_seed(0)
    documents = (torch.rand(1, T, device="cuda", generator=draw) < 1 / 700).cumsum(1)
    call = gpu_parts.Call(shape, shape, shape, window, documents)
    (found,) = measured(exact_numbers.attention_numbers, call, **FLEX)
    assert found[0] == "ok", found


@pytest.mark.parametrize("fp8", ["off", pytest.param("head", marks=needs_fp8)])
def test_the_loss_kernel_at_real_size(fp8, measured):
    """49,152 rows of 50,304 logits, more than 2^31; the last rows are looked at by themselves."""
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.empty(1, 49_152, 768, device="cuda")
    head = torch.empty(50_304, 768, device="cuda")
    targets = torch.randint(50_304, (1, 49_152), device="cuda", generator=draw)
    fused = train_gpt.fused_loss if fp8 == "off" else train_gpt.fp8_fused_loss
    args = x, head, targets, (15.0, 0.0, 0.0)
    (found,) = measured(exact_numbers.loss_numbers, args, fp8=fp8,
                        loss=partial(fused, row_losses=train_gpt.kernel_losses))
    assert found[0] == "ok" and "49,152 x 50,304" in found[1], found


@needs_fp8
def test_fp8_products_at_real_size(measured):
    """scaled_mm in its three layouts."""
    args = torch.empty(1, 49_152, 768, device="cuda"), torch.empty(50_304, 768, device="cuda"), torch.zeros(
        1, 49_152, device="cuda", dtype=torch.long)
    (found,) = measured(exact_numbers.fp8_numbers, args)
    assert found[0] == "ok", found


# ------------------------------------------------------------ scores
def test_evaluation_equals_the_cpu(train):
    """The same artifact, in bf16 on the GPU and in fp32 on the CPU; any number of tokens at a time."""
    trained = train(GPU, VAL_TOKENS="0")
    assert trained.code == 0, trained.err
    path = trained.folder / "final_model.int8.ptz"
    asked = dict(EVAL_FROM=str(path), COMPILE="0", DATA_FINGERPRINT="",
                 DATA_PATH=TOY["DATA_PATH"])
    gpu, cpu = (train(asked, DEVICE=device).result for device in ("cuda", "cpu"))
    assert gpu["val_loss"] == pytest.approx(trained.result["val_loss"], abs=1e-5)
    for name in ("val_loss", "val_bpb"):
        assert gpu[name] == pytest.approx(cpu[name], abs=1e-2)
    models = [train_gpt.load_model(path, device)[0] for device in ("cuda", "cpu")]
    for T in (64, 5, 200):
        tokens = torch.randint(512, (2, T), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            got, want = (train_gpt.log_probs(model, tokens.to(model.embed.device)) for model in models)
        assert got.dtype == want.dtype == torch.float32 and got.device.type == "cuda"
        assert (got.cpu() - want).abs().max() < 0.3
        torch.testing.assert_close(got.exp().sum(-1), torch.ones(2, T, device="cuda"), rtol=0, atol=1e-4)
