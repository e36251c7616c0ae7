"""What is fast when compiled: attention on a CPU against torch's, Adam in one pass against its formula."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import kernels
import train_gpt
from helpers import toy_config

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOWS = {
    "the whole past": None, "a window": (40, False), "a window, documents": (40, True),
    "documents": (500, True)}


def tensors(B, H, KV, T, D, dtype=torch.float32):
    draw = torch.Generator().manual_seed(T)
    return [torch.randn(B, n, T, D, generator=draw).to(dtype).requires_grad_() for n in (H, KV, KV)]


def results(kernel, inputs, mask, scale):
    y = train_gpt.attention(*inputs, mask, scale, kernel)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y, *torch.autograd.grad((y.float() * weight).sum(), inputs)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "H, KV, T, scale", [(2, 2, 512, None), (4, 2, 300, 0.3), (2, 1, 129, 0.1), (1, 1, 7, None)])
def test_cpu_attention_equals_torch(window, H, KV, T, scale, monkeypatch):
    """Values and all gradients, for lengths that are no multiple of what is done at a time."""
    inputs, mask = tensors(2, H, KV, T, 16), None
    if WINDOWS[window]:
        reach, documents = WINDOWS[window]
        numbers = torch.stack([torch.arange(T) // 50, torch.arange(T) // 33]) if documents else None
        mask = train_gpt.window_mask(reach, T, numbers, "cpu")
    want = results(F.scaled_dot_product_attention, inputs, mask, scale)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", None)  # not taken any more
    for mine, theirs in zip(results(kernels.cpu_attention, inputs, mask, scale), want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_cpu_attention_in_bf16(monkeypatch):
    """As near to fp32 as torch's own in bf16, the weights' sums in fp32."""
    exact = results(F.scaled_dot_product_attention, tensors(2, 2, 2, 512, 64), None, None)
    inputs = tensors(2, 2, 2, 512, 64, torch.bfloat16)
    theirs = results(F.scaled_dot_product_attention, inputs, None, None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    ours = results(kernels.cpu_attention, inputs, None, None)
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - true).norm() < 1.5 * (other - true).norm() + 1e-3


@pytest.mark.parametrize("T, compiling, taken", [(256, False, True), (2048, True, True), (1024, True, False)])
def test_cpu_attention_is_for_compiled_short_sequences(T, compiling, taken, monkeypatch):
    calls, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    spied = lambda *args, **options: calls.append(1) or real(*args, **options)  # noqa: E731
    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", spied)
    kernels.cpu_attention(*tensors(1, 1, 1, T, 8), is_causal=True)
    assert bool(calls) == taken


@pytest.mark.parametrize("settings, kernel", [
    (dict(), kernels.cpu_attention), (dict(artifact_bytes_limit=10**7), None),
    (dict(fp8="all"), kernels.cpu_attention)])
def test_a_cpu_gets_it_unless_bytes_count(settings, kernel, tiny_data):
    cfg = toy_config(tiny_data, **dict(vocab_size=512) | settings)
    made = train_gpt.fast_kernels(cfg, train_gpt.Team(cfg, {}), lambda *_: None)
    assert (made[2] if made else None) is kernel


def test_a_gpu_keeps_torch(tiny_data):
    cfg = toy_config(tiny_data, vocab_size=512)
    team = train_gpt.Team(cfg, {})
    team.on_gpu = True
    assert train_gpt.fast_kernels(cfg, team, print) == ()
    assert kernels.choose(train_gpt, cfg, True, print) == (train_gpt.linear,) * 2


@pytest.mark.parametrize("cap, dtype, T", [
    (15.0, torch.float32, 9), (30.0, torch.float32, 64), (50.0, torch.float32, 1),
    (15.0, torch.bfloat16, 64)])
def test_cpu_loss_equals_cross_entropy(cap, dtype, T, monkeypatch):
    """Value and gradients, also where logits are at the cap."""
    draw = torch.Generator().manual_seed(T)
    x = torch.randn(3, T, 32, generator=draw).to(dtype).requires_grad_()
    head = (torch.randn(50, 32, generator=draw) * 5).requires_grad_()
    targets = torch.randint(50, (3, T), generator=draw)

    def run(loss):
        value = loss(x, head, targets, cap, train_gpt.linear)
        return [value, *torch.autograd.grad(value, (x, head))]

    want = run(train_gpt.lm_loss)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(train_gpt, "lm_loss", None)  # not taken any more
    for mine, theirs in zip(run(partial(kernels.cpu_loss, train_gpt)), want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("compiling, cap", [(False, 15.0), (True, 0.0), (True, 51.0)])
def test_cpu_loss_leaves_the_rest_to_the_reference(compiling, cap, monkeypatch):
    """Uncapped logits could overflow exp, and an eager step would only be slower."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(train_gpt, "lm_loss", lambda *args: args)
    targets = torch.zeros(1, 1, dtype=torch.long)
    args = (torch.zeros(1, 1, 2), torch.zeros(3, 2), targets, cap, train_gpt.linear)
    assert kernels.cpu_loss(train_gpt, *args) == args


def test_adam_step_is_its_formula():
    """Three steps on the numbers of a bank; the gradient is scaled and kept as it is."""
    draw = torch.Generator().manual_seed(0)
    p, grad, m, v = (torch.randn(5, 64, generator=draw) for _ in range(4))
    v = v.square()
    want = [t.double().clone() for t in (p, m, v)]
    for step in (1, 2, 3):
        g = grad.double() * 0.25
        want[1] = 0.8 * want[1] + 0.2 * g
        want[2] = 0.95 * want[2] + 0.05 * g * g
        want[0] -= 0.3 * want[1] / (1 - 0.8**step) / ((want[2] / (1 - 0.95**step)).sqrt() + 1e-8)
        kept = grad.clone()
        train_gpt.adam_step(p, grad, m, v, *map(torch.tensor, (0.25, float(step), 0.3)), 0.8, 0.95, 1e-8)
        assert torch.equal(grad, kept)
    for mine, theirs in zip((p, m, v), want):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


def test_rehearsal_compiles_the_optimizer_only_with_the_model(tiny_data, monkeypatch):
    """COMPILE=0 leaves Adam eager; where the model cannot be compiled, neither is."""
    compiled = []

    def compile(function, **_):
        compiled.append(function)

        def fail(*_):
            raise RuntimeError("no compiler here")
        return fail

    monkeypatch.setattr(torch, "compile", compile)
    for on in (False, True):
        cfg = toy_config(tiny_data, vocab_size=512, compile=on)
        model = train_gpt.GPT(cfg)
        train_gpt.init_parameters(model, 0)
        optimizer, lines = train_gpt.Optimizer(model, cfg), []
        team = train_gpt.Team(cfg, {})
        assert train_gpt.rehearse(cfg, team, model, optimizer, 2, lines.append) is model
        assert optimizer.adam_step is train_gpt.adam_step
        assert len(lines) == on and (train_gpt.adam_step in compiled) == on
