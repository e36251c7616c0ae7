"""fp8 products against fp32 and against an emulation in float64 that shares no code with them; the choice."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import test_speedrun_plus
import train_gpt
from helpers import init_parameters
from test_kernels import SMALL
from tools.run import plan
from train_gpt import RECIPES, Refused, fp8_linear, linear, preset_config, scaled_mm, to_fp8


def fp8_head(x, weight, most=train_gpt.HEAD_MOST):
    """linear() of lm_head in fp8, by fixed scales."""
    return fp8_linear(x, weight, train_gpt.head_scales(x.size(-1), x[..., 0].numel(), most))


E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
GRID = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}  # mantissa bits, least exponent, largest value
T = 256
C = 256
V = 192
LAYERS = {  # with the scales of x, weight and gradient; None: by the maximum
    "dynamic": (fp8_linear, (None, None, None)), "head": (fp8_head, (C**0.5 / 448, 2**-9, 1 / 448 / T))}
pytestmark = pytest.mark.usefixtures("one_thread")


def emulate(x, scale, dtype):
    """The fp8 values of x / scale in float64: nearest on the grid, ties to even, saturated."""
    bits, least, top = GRID[dtype]
    v = (x.float() / scale).double()
    step = torch.exp2((torch.frexp(v).exponent - 1).clamp(min=least) - bits)
    return (torch.round(v / step) * step).clamp(-top, top)


def same_bits(value, emulated):
    value = value.double()
    return torch.equal(value, emulated) and torch.equal(value.signbit(), emulated.signbit())


def scale_of(x, scale, dtype):
    return x.float().abs().max() / GRID[dtype][2] if scale is None else torch.tensor(scale)


def within_bf16(got, a, b, scale):
    """got is the float64 product of a and b, up to one rounding to bf16 and the accumulation."""
    want = (a @ b) * scale.double()
    most = (a.abs() @ b.abs()) * scale.double()
    return bool(((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-6 * most).all())


def run(layer, x, w, loss):
    """-> y, grad_x, grad_w"""
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    y = layer(x, w)
    return y.detach(), *torch.autograd.grad(loss(y), (x, w))


@pytest.fixture
def calls(monkeypatch):
    """What each torch._scaled_mm to come is given: a, b, their scales, fast accumulation."""
    calls = []
    real = torch._scaled_mm

    def spied(a, b, scale_a, scale_b, out_dtype, use_fast_accum=False):
        calls.append((a, b, scale_a.reshape(()), scale_b.reshape(()), use_fast_accum))
        return real(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    monkeypatch.setattr(torch, "_scaled_mm", spied)
    return calls


@pytest.fixture
def head():
    """x (T, C) of unit rms, w (V, C), the mean loss over T targets: a language model's last layer."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, C, generator=generator) for n in (T, V))
    targets = torch.randint(V, (T,), generator=generator)
    return F.rms_norm(x, (C,)).bfloat16(), 0.02 * w, lambda y: F.cross_entropy(y.float(), targets)


# ------------------------------------------------------------ values
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_to_fp8_is_bit_exact(dtype):
    """All values of the type, the ties between them and their neighbours; saturation; nan stays nan."""
    top = GRID[dtype][2]
    inf = float("inf")
    nan = float("nan")
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    beside = (ties, ties.nextafter(every[1:]), ties.nextafter(every[:-1]))
    x = torch.cat((every, *beside, 100 * torch.randn(4096, generator=torch.Generator().manual_seed(0))))
    for scale in (1, 0.3, None):
        values, factor = to_fp8(x, scale, dtype)
        assert torch.equal(factor, scale_of(x, scale, dtype).float()) and factor.shape == ()
        assert values.dtype == dtype and same_bits(values, emulate(x, factor, dtype))
    assert values.double().abs().max() == top
    got = to_fp8(torch.tensor([1.01 * top, 2 * top, 1e30, inf, -1e9, -inf, nan]), 1, dtype)[0].float()
    assert got[:-1].tolist() == [top] * 4 + [-top] * 2 and got[-1].isnan()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("size", [1.0, 2.0**-30, 2.0**20])
def test_a_layer_is_the_emulated_one(head, layer, size, calls):
    """Its three products, their scales and layouts; fast accumulation in the forward only."""
    x, w, _ = head
    x = x * size
    g = torch.randn(T, V, generator=torch.Generator().manual_seed(3)).bfloat16() * 1e-3
    y, gx, gw = run(LAYERS[layer][0], x, w, lambda y: (y * g).sum())
    kinds = list(zip((x, w, g), LAYERS[layer][1], (E4M3, E4M3, E5M2), strict=True))
    sx, sw, sg = scales = [scale_of(*kind) for kind in kinds]
    qx, qw, qg = (emulate(t, s, dtype) for s, (t, _, dtype) in zip(scales, kinds))
    want = [(qx, qw.T, sx, sw, True), (qg, qw, sg, sw, False), (qg.T, qx, sg, sx, False)]
    for call, (a, b, sa, sb, fast) in zip(calls, want, strict=True):
        assert same_bits(call[0], a) and same_bits(call[1], b)
        assert torch.equal(call[2], sa) and torch.equal(call[3], sb) and call[4] is fast
    assert within_bf16(y, qx, qw.T, sx.double() * sw)
    assert within_bf16(gx, qg, qw, sg.double() * sw)
    assert within_bf16(gw, qg.T, qx, sg.double() * sx)


@pytest.mark.parametrize("layer", LAYERS)
def test_zeros(layer):
    x = torch.zeros(32, 64)
    w = torch.zeros(48, 64)
    for got in run(LAYERS[layer][0], x, w, lambda y: 0 * y.sum()):
        assert torch.equal(got, torch.zeros_like(got))


# ------------------------------------------------------------ what CUDA asks for: sides, layouts
def test_any_strides_are_taken_and_alignment_is_asserted(calls):
    generator = torch.Generator().manual_seed(3)
    one = torch.ones(())
    x = torch.randn(64, 8, 6, generator=generator).permute(2, 1, 0)
    w = torch.randn(64, 32, generator=generator).t()
    got, want = (run(layer, x, w, lambda y: y.sum()) for layer in (fp8_linear, F.linear))
    assert got[0].shape == (6, 8, 32)  # .sum() hands back a gradient of strides 0
    for mine, exact in zip(got, want, strict=True):
        assert mine.shape == exact.shape and (mine - exact).norm() < 8e-2 * exact.norm()
    assert len(calls) == 3 and all(call[0].is_contiguous() and call[1].t().is_contiguous() for call in calls)
    for m, k, n in ((33, 48, 64), (32, 40, 64), (32, 48, 65)):
        with pytest.raises(AssertionError, match="multiples of 16"):
            scaled_mm(torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3), one, one)


# ------------------------------------------------------------ which are chosen
PRESETS = {"head": "speedrun", "all": "gpt2"}   # a recipe for each part that may be in fp8


def choose(part, on_gpu=False, **settings):
    """(the product of the blocks, is lm_head in fp8?, what each line in the log says that fp8 is)"""
    lines = []
    cfg = replace(preset_config(PRESETS[part]), **settings)
    kernels = cfg.choose_kernels(on_gpu, lines.append)
    products = kernels.linear, getattr(kernels.loss, "func", kernels.loss) is train_gpt.fp8_fused_loss
    return products, [re.search(r" is (\w+)", line)[1] for line in lines if line.startswith("fp8")]


def test_the_scales_of_speedrun_plus():
    """Of its specification; weights beyond 0.875 are kept, as those of speedrun are not."""
    cfg = replace(preset_config("speedrun_plus"), fp8="all")
    most = cfg.fp8_head_most
    assert train_gpt.head_scales(768, 10, most) == (100 / 448, 1.6 / 448, 0.75 / 448 / 10)
    assert cfg.choose_kernels(False, print).loss.keywords["most"] == most
    x = torch.ones(16, 16, requires_grad=True)
    weight = torch.full((16, 16), 1.5)
    assert fp8_head(x, weight, most).mean().item() == pytest.approx(24, rel=0.1)
    assert fp8_head(x, weight).mean().item() == pytest.approx(14, rel=0.1)


@pytest.mark.parametrize("off", ["fp8_qkv", "fp8_mlp"])
def test_the_part_of_speedrun_plus(off):
    """What memory is planned for: all only if the blocks' products are in fp8, too."""
    cfg = replace(preset_config("speedrun_plus"), fp8="all")
    assert plan.fp8_part(cfg, False) == "all" and plan.fp8_part(replace(cfg, **{off: False}), False) == "head"
    assert plan.fp8_part(replace(cfg, fp8="off"), False) == "off"


@pytest.fixture
def capability(monkeypatch):
    return lambda *value: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: value)


@pytest.mark.parametrize("part, kinds", [("head", (linear, True)), ("all", (fp8_linear, True))])
def test_the_choice(part, kinds, capability, monkeypatch):
    """A given value works on a CPU; auto falls back where a GPU cannot do it; the log says so. GPUs of a ROCm
    build also say that they are of capability 9."""
    plain = (linear, False)
    assert choose(part, fp8="off") == (plain, [])
    assert choose(part, fp8=part) == (kinds, [part])
    assert choose(part, fp8=f"auto-{part}") == (plain, ["off"])
    for value, hip, able in (((8, 9), None, True), ((9, 0), None, True), ((8, 0), None, False),
                             ((9, 4), "7.1", False)):
        capability(*value)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert choose(part, True, fp8=f"auto-{part}") == ((kinds, [part]) if able else (plain, ["off"]))
        if not able:
            with pytest.raises(Refused, match="8.9"):
                choose(part, True, fp8=part)


@pytest.mark.parametrize("part", ["head", "all"])
@pytest.mark.parametrize("settings", [dict(vocab_size=500), dict(model_dim=1000), dict(train_seq_len=8),
                                      dict(num_heads=32, model_dim=768)])
def test_sides_that_are_no_multiples_of_16(settings, part, capability):
    """A refusal of a given value, a line for auto."""
    with pytest.raises(Refused, match="multiples of 16"):
        choose(part, fp8=part, **settings)
    capability(9, 0)
    assert choose(part, True, fp8=f"auto-{part}", **settings) == ((linear, False), ["off"])


@pytest.mark.parametrize("cfg, products, least, cosine", [
    (RECIPES["speedrun"](**SMALL, num_layers=8, fp8="head"), 1, 2, 0.95),
    (RECIPES["gpt2"](**SMALL, num_layers=2, depth=0, fp8="all"), 1 + 6 * 2, 2, 0.95),
    (test_speedrun_plus.small(fp8="all"), 1 + 10 + 2 * 11, 200, 0.9)], ids=["speedrun", "gpt2", "plus"])
def test_training_is_near_fp32_and_evaluation_is_fp32(cfg, products, least, cosine, calls):
    """Gradients of `least` numbers or more: of lambdas and gates little but noise is left."""
    models = [cfg.make_model(cfg.choose_kernels(False, print)), cfg.make_model()]
    tokens = torch.randint(cfg.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in models:
        init_parameters(model, 0)
        for p in model.parameters():
            p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05
        context = model.context(64, torch.device("cpu"), torch.float32, cfg.stages()[0])
        model.update_context(context, 0.0)
        losses.append(model(tokens[:, :-1], tokens[:, 1:], context))
    assert len(calls) == products
    assert losses[0] != losses[1] and losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    for loss in losses:
        (16 * loss).backward()
    for (name, mine), exact in zip(models[0].named_parameters(), models[1].parameters()):
        if mine.numel() >= least and exact.grad is not None and exact.grad.any():
            assert F.cosine_similarity(mine.grad.flatten(), exact.grad.flatten(), dim=0) > cosine, name
    calls.clear()
    with torch.no_grad():
        assert torch.equal(*(train_gpt.log_probs(model, tokens[:, :-1]) for model in models))
    assert not calls
