"""fp8 products against fp32 and against an emulation in fp64 that shares no code with them; the choice."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import train_gpt
from helpers import TOY, toy_config
from kernels import fp8_head, fp8_linear, scaled_mm, to_fp8
from train_gpt import Refused, Team

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRID = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}  # mantissa bits, least exponent, largest value
T, C, V = 256, 256, 192
DYNAMIC, HEAD = (None, None, None), (C**0.5 / 448, 2**-9, 1 / 448 / T)  # what fp8_head takes for a mean of T
LAYERS = {"dynamic": (fp8_linear, DYNAMIC), "head": (fp8_head, HEAD)}


pytestmark = pytest.mark.usefixtures("one_thread")


def emulate(x, scale, dtype):
    """The fp8 values of x / scale in fp64: nearest on the grid, ties to even, saturated."""
    bits, least, top = GRID[dtype]
    v = (x.float() / scale).double()
    step = torch.exp2((torch.frexp(v).exponent - 1).clamp(min=least) - bits)
    return (torch.round(v / step) * step).clamp(-top, top)


def same_bits(value, emulated):
    value = value.double()
    return torch.equal(value, emulated) and torch.equal(value.signbit(), emulated.signbit())


def scale_of(x, scale, dtype):
    return x.float().abs().max() / GRID[dtype][2] if scale is None else torch.tensor(scale)


def close(got, want):
    """Issue 4's bounds: relative error and cosine."""
    got, want = got.double().flatten(), want.double().flatten()
    return (got - want).norm() < 8e-2 * want.norm() and F.cosine_similarity(got, want, dim=0) > 0.99


def within_bf16(got, a, b, scale):
    """got is the fp64 product of the quantised a and b, up to one rounding to bf16 and the accumulation."""
    want, most = (a @ b) * scale.double(), (a.abs() @ b.abs()) * scale.double()
    return bool(((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-6 * most).all())


def run(layer, x, w, loss):
    """-> y, grad_x, grad_w"""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = layer(x, w)
    return y.detach(), *torch.autograd.grad(loss(y), (x, w))


@pytest.fixture
def spy(monkeypatch):
    """What each torch._scaled_mm to come is given: a, b, their scales, fast accumulation."""
    calls, real = [], torch._scaled_mm

    def spied(a, b, scale_a, scale_b, out_dtype, use_fast_accum=False):
        calls.append((a, b, scale_a, scale_b, use_fast_accum))
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


# -------------------------------------------------------------------------------- against fp32
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_close_to_fp32(head, layer, dtype):
    """Forward and both gradients, those of a mean loss; dtypes as those of `linear`."""
    x, w, loss = head
    got = run(LAYERS[layer][0], x.to(dtype), w, loss)
    for a, b in zip(got, run(train_gpt.linear, x.float(), w, loss), strict=True):
        assert a.isfinite().all() and close(a, b)
    assert [t.dtype for t in got] == [dtype, dtype, torch.float32]


def test_the_head_s_gradient_scale_follows_the_number_of_tokens(head, spy):
    """A mean over twice as many tokens has gradients half as large: the same fp8 values."""
    x, w, loss = head
    run(fp8_head, x, w, loss)
    run(fp8_head, torch.cat((x, x)), w, lambda y: (loss(y[:T]) + loss(y[T:])) / 2)
    once, twice = spy[1][0].double(), spy[4][0].double()
    assert torch.equal(torch.cat((once, once)), twice) and spy[1][2] == 2 * spy[4][2]


def test_dynamic_scales_follow_any_power_of_two(head):
    x, w, _ = head
    g = torch.randn(T, V, generator=torch.Generator().manual_seed(2)).bfloat16()
    y, gx, gw = run(fp8_linear, x, w, lambda y: (y * g).sum())
    for s in (2.0**-30, 2.0**30):
        y2, gx2, gw2 = run(fp8_linear, x * s, w, lambda y: (y * (g * s)).sum())
        assert torch.equal(y2, y * s) and torch.equal(gx2, gx * s) and torch.equal(gw2, gw * s * s)


# -------------------------------------------------------------------------------- against the emulation
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_to_fp8_is_bit_exact(dtype):
    """All values of the type, the ties between them and their neighbours; saturation; nan stays nan."""
    top = GRID[dtype][2]
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    near = (ties, ties.nextafter(every[1:]), ties.nextafter(every[:-1]))
    x = torch.cat((every, *near, 100 * torch.randn(4096, generator=torch.Generator().manual_seed(0))))
    for scale in (1, 0.3, None):
        values, factor = to_fp8(x, scale, dtype)
        assert torch.equal(factor, scale_of(x, scale, dtype).float()) and factor.shape == ()
        assert values.dtype == dtype and same_bits(values, emulate(x, factor, dtype))
    assert values.double().abs().max() == top
    inf, nan = float("inf"), float("nan")
    got = to_fp8(torch.tensor([1.01 * top, 2 * top, 1e30, inf, -1e9, -inf, nan]), 1, dtype)[0].float()
    assert got[:-1].tolist() == [top] * 4 + [-top] * 2 and got[-1].isnan()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_the_emulated_one(head, layer, spy):
    """Its three products, their scales and layouts; fast accumulation in the forward only."""
    x, w, _ = head
    g = torch.randn(T, V, generator=torch.Generator().manual_seed(3)).bfloat16() * 1e-3
    y, gx, gw = run(LAYERS[layer][0], x, w, lambda y: (y * g).sum())
    kinds = list(zip((x, w, g), LAYERS[layer][1], (E4M3, E4M3, E5M2), strict=True))
    sx, sw, sg = scales = [scale_of(*kind) for kind in kinds]
    qx, qw, qg = (emulate(t, s, dtype) for s, (t, _, dtype) in zip(scales, kinds))
    want = [(qx, qw.T, sx, sw, True), (qg, qw, sg, sw, False), (qg.T, qx, sg, sx, False)]
    for call, (a, b, sa, sb, fast) in zip(spy, want, strict=True):
        assert same_bits(call[0], a) and same_bits(call[1], b)
        assert torch.equal(call[2], sa) and torch.equal(call[3], sb) and call[4] is fast
    assert within_bf16(y, qx, qw.T, sx.double() * sw)
    assert within_bf16(gx, qg, qw, sg.double() * sw)
    assert within_bf16(gw, qg.T, qx, sg.double() * sx)


# -------------------------------------------------------------------------------- edges
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("zero", ["x", "w", "grad", "all"])
def test_zeros(layer, zero):
    generator = torch.Generator().manual_seed(2)
    sizes = {"x": (32, 64), "w": (48, 64), "grad": (32, 48)}
    x, w, g = (torch.randn(s, generator=generator) * (zero not in (n, "all")) for n, s in sizes.items())
    y, gx, gw = run(LAYERS[layer][0], x, w, lambda y: (y * g).sum())
    for got, factors in ((y, "xw"), (gx, "gw"), (gw, "gx")):
        assert got.isfinite().all() and got.any() == (zero != "all" and zero[0] not in factors)


def test_any_strides_and_leading_dimensions():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 8, 6, generator=generator).permute(2, 1, 0)
    w = torch.randn(64, 32, generator=generator).t()
    got, want = (run(layer, x, w, lambda y: y.sum()) for layer in (fp8_linear, F.linear))
    assert got[0].shape == (6, 8, 32)  # .sum() hands back a gradient of strides 0
    assert all(a.shape == b.shape and close(a, b) for a, b in zip(got, want, strict=True))


# -------------------------------------------------------------------------------- what CUDA would refuse
def test_layouts_are_made_and_alignment_is_asserted(spy):
    one = torch.ones(())
    a, b = (torch.randn(s, generator=torch.Generator().manual_seed(1)).to(E4M3) for s in ((32, 48), (64, 48)))
    want = a.float() @ b.float().t()
    for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        assert close(scaled_mm(x, y, one, one), want)
    assert all(call[0].is_contiguous() and call[1].t().is_contiguous() for call in spy)
    for m, k, n in ((33, 48, 64), (32, 40, 64), (32, 48, 65)):
        with pytest.raises(AssertionError, match="multiples of 16"):
            scaled_mm(torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3), one, one)
    with pytest.raises(AssertionError, match="multiples of 16"):
        fp8_linear(torch.zeros(3, 7, 32), torch.zeros(16, 32))


def test_torch_finds_every_operand_fit_for_cuda(head, spy):
    """torch's shape function holds CUDA's rules; it runs on fake CUDA tensors, with no GPU."""
    run(fp8_linear, *head)
    calls = list(spy)
    with FakeTensorMode():
        one = torch.ones((), device="cuda")
        a, b = (torch.empty(s, device="cuda").to(E4M3) for s in ((16, 32), (32, 48)))
        with pytest.raises(RuntimeError, match="col_major"):  # the check itself works
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        for a, b, *_ in calls:
            assert {a.dtype, b.dtype} != {E5M2}  # no such product on CUDA
            a, b = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (a, b))
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
    assert len(calls) == 3


def test_compiled_equals_eager(head):
    """In one graph."""
    x, w, loss = head
    torch._dynamo.reset()
    compiled = torch.compile(fp8_head, backend="aot_eager", fullgraph=True, dynamic=False)
    got, want = (run(layer, x.float(), w, loss) for layer in (compiled, fp8_head))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# -------------------------------------------------------------------------------- which are chosen
@pytest.fixture
def choose(tiny_data):
    """settings -> ((product of the blocks, of the head), the log's lines)"""

    def call(on_gpu=False, **settings):
        cfg, lines = toy_config(tiny_data, **dict(vocab_size=512) | settings), []
        team = Team(cfg, {})
        team.on_gpu = on_gpu
        return train_gpt.fast_kernels(cfg, team, lines.append)[:2], lines

    return call


@pytest.mark.parametrize("part, kinds", [("head", (train_gpt.linear, fp8_head)), ("all", (fp8_linear,) * 2)])
def test_explicit_values_work_on_a_cpu_and_auto_falls_back(part, kinds, choose):
    linear = train_gpt.linear
    assert choose(fp8=part) == (kinds, [f"fp8: {part} is {part}"])
    assert choose(fp8=f"auto-{part}") == ((linear, linear), [f"fp8: auto-{part} is off"])
    assert choose(fp8="off") == ((linear, linear), [])


@pytest.mark.parametrize("settings", [dict(vocab_size=500), dict(model_dim=48), dict(train_seq_len=8)])
def test_odd_sides(settings, choose, monkeypatch):
    """A multiple of 16 is asked of each: exit 2 for an explicit value, a line for auto."""
    for part in ("head", "all"):
        with pytest.raises(Refused, match=f"fp8={part} needs .*multiples of 16"):
            choose(fp8=part, **settings)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        kinds, (line,) = choose(fp8=f"auto-{part}", on_gpu=True, **settings)
        assert kinds == (train_gpt.linear,) * 2 and line == f"fp8: auto-{part} is off"


@pytest.mark.parametrize("capability, able", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_by_its_capability(capability, able, choose, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    kinds, (line,) = choose(fp8="auto-all", on_gpu=True)
    assert kinds == ((fp8_linear if able else train_gpt.linear),) * 2
    assert line == f"fp8: auto-all is {'all' if able else 'off'}"
    if not able:
        with pytest.raises(Refused, match=r"fp8=head needs compute capability 8.9, here \(8, 0\)"):
            choose(fp8="head", on_gpu=True)


@pytest.mark.parametrize("fp8", ["head", "all"])
def test_training_is_near_fp32_and_evaluation_is_fp32(fp8, choose, tiny_data, spy):
    cfg = toy_config(tiny_data, vocab_size=512, fp8=fp8)
    kinds, _ = choose(fp8=fp8)
    model, plain = train_gpt.GPT(cfg, torch.float32, train_gpt.Fast(*kinds)), train_gpt.GPT(cfg)
    for one in (model, plain):
        train_gpt.init_parameters(one, 0)
        one.set_context(64, 0)
        with torch.no_grad():
            for p in one.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    spy.clear()
    tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(0))
    losses = [one(tokens[:, :-1], tokens[:, 1:]) for one in (model, plain)]
    assert len(spy) == (1 if fp8 == "head" else 1 + 6 * cfg.num_layers)
    assert losses[0] != losses[1] and losses[0].item() == pytest.approx(losses[1].item(), abs=2e-2)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.95, name
    products = len(spy)
    with torch.no_grad():
        assert torch.equal(*(train_gpt.log_probs(one, tokens[:, :-1]) for one in (model, plain)))
    assert len(spy) == products


@pytest.mark.parametrize("fp8, line", [("head", "fp8: head is head"), ("auto-all", "fp8: auto-all is off")])
def test_runs(fp8, line, tiny_data, tmp_path, monkeypatch, capsys, spy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(tiny_data / "data")
    assert train_gpt.main([], TOY | dict(FP8=fp8, ITERATIONS="3", SAMPLE_TOKENS="0", RUN_ID="x")) == 0
    assert line in capsys.readouterr().out.splitlines() and bool(spy[3:]) == (fp8 == "head")
