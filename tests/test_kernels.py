"""Attention, masks and loss: the readable versions against dense ones, the fast ones against the readable."""

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import TOY, init_parameters, load_module, planted, slow, toy_config
from tools.run import plan
from train_gpt import (
    RECIPES, attention, linear, lm_loss, preset_config, window_mask)

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = dict(vocab_size=512, train_seq_len=64, train_batch_tokens=64, model_dim=32, num_heads=2)


@pytest.fixture
def compiling(monkeypatch):
    """Fast versions are for compiled steps: now each call is taken for one."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def tensors(B, H, KV, T, D, dtype=torch.float32):
    draw = torch.Generator().manual_seed(T)
    return [torch.randn(B, n, T, D, generator=draw).to(dtype).requires_grad_() for n in (H, KV, KV)]


def gradients(y, inputs):
    """[y, gradients of all inputs], those of a weighted sum."""
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return [y, *torch.autograd.grad((y.float() * weight).sum(), inputs)]


def two_rows(T):
    """The number of each token's document in two rows: many lengths, one that ends with a block of 128; one
    document longer than all windows."""
    lengths = torch.tensor([[7, 121, 128, 1, 300, T], [T, 0, 0, 0, 0, 0]])
    begins = torch.zeros(2, T + 1, dtype=torch.long)
    for row, some in zip(begins, lengths):
        row[some.cumsum(0).clamp(max=T)] = 1
    return begins[:, :T].cumsum(1)


def seen_by_each(window, T, documents):
    """What each query may see by the definition, bool (rows, T, T)."""
    query = torch.arange(T)[:, None]
    key = torch.arange(T)
    seen = ((key <= query) & (query - key <= window))[None]
    return seen if documents is None else seen & (documents[:, :, None] == documents[:, None])


# ------------------------------------------------------------ queries, keys and values
class Products(TorchDispatchMode):
    """The shapes of the matrix products that run inside, and of what is joined there."""
    def __init__(self):
        super().__init__()
        self.shapes = []
        self.joined = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **kwargs or {})
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(y.shape))
        if function is torch.ops.aten.cat.default:
            self.joined.append(tuple(y.shape))
        return y


def projected(dtype, product=linear, weights=None):
    """[q, k, v and the gradients of x and the matrices], what Products saw: 48 channels, 4 query heads of 8,
    2 heads of keys and values. weights: the matrices' dtype, if another one."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 48, generator=draw).to(dtype).requires_grad_()
    matrices = []
    for n in (32, 16, 16):
        matrices.append(torch.randn(n, 48, generator=draw).to(weights or dtype).requires_grad_())
    with Products() as products:
        heads = train_gpt.project_heads(x, 8, product, *matrices)
        assert [part.shape for part in heads] == [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]
        grads = [torch.randn(part.shape, generator=draw).to(dtype) for part in heads]
        found = [*heads, *torch.autograd.grad(heads, [x, *matrices], grads)]
    return found, products


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_in_bf16_queries_keys_and_values_are_one_product(weights):
    """One forward and one for each gradient, equal to the definition but for bf16's rounding."""
    found, products = projected(torch.bfloat16, weights=weights)
    assert sorted(products.shapes) == [(10, 48), (10, 64), (64, 48)]
    # gradients are joined as heads: the kernels that make them can write them in place, see docs/log.md
    assert products.joined == [(64, 48), (2, 5, 8, 8)]
    apart, several = projected(torch.bfloat16, lambda x, w: linear(x, w), weights)
    assert len(several.shapes) == 9
    exact, _ = projected(torch.float32)
    for mine, three, wanted in zip(found, apart, exact):
        assert mine.dtype == three.dtype and mine.shape == three.shape
        for other in (three, wanted):
            assert (mine.float() - other.float()).norm() < 0.01 * wanted.norm()
    # views of one buffer, which rotary, norm and attention read as they lie
    assert len({part.untyped_storage().data_ptr() for part in found[:3]}) == 1
    assert all(part.stride(-1) == 1 and part.stride(-2) == 8 for part in found[:3])


@pytest.mark.parametrize("preset", ["tiny", "golf", "golf_plus", "gpt2", "gpt2_plus", "speedrun"])
def test_each_recipe_s_blocks_make_one_product_of_them(preset):
    cfg = toy_config("", preset)
    model = cfg.make_model()
    init_parameters(model, 0)
    tokens = torch.arange(48).view(1, 48)
    counted = []
    for dtype in (torch.float32, torch.bfloat16):
        context = model.context(48, tokens.device, dtype)
        with torch.no_grad(), Products() as products:
            model.hidden(tokens, context)
        counted.append(len(products.shapes))
    attending = cfg.num_layers
    if preset != "golf":
        attending = sum(layer.passes for layer in plan.layers_of(cfg) if layer.window)
    assert counted[0] - counted[1] == 2 * attending > 0


# ------------------------------------------------------------ masks and attention
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("T, window", [(1, 1), (5, 9), (64, 16), (100, 16), (97, 48), (97, 49), (33, 16),
                                       (65, 32), (50, 1), (31, 2), (100, 98), (100, 99), (100, 100)])
def test_blocks_equal_dense_attention(T, window, with_documents):
    """Values and gradients; T is a multiple of the window or not; two queries share a key; the cost is that
    of the window."""
    documents = torch.stack([torch.arange(T) // 7, torch.arange(T) // 41]) if with_documents else None
    inputs = tensors(2, 4, 2, T, 8, torch.float64)
    mask = window_mask(window, T, documents, "cpu")
    q = inputs[0]
    k, v = [x.repeat_interleave(2, 1) for x in inputs[1:]]
    scores = (q @ k.mT * 0.3).masked_fill(~seen_by_each(window, T, documents)[:, None], -torch.inf)
    want = gradients(scores.softmax(-1) @ v, inputs)
    got = gradients(attention(inputs[0] * 0.3, *inputs[1:], mask), inputs)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert mask is None or mask.numel() <= (1 + with_documents) * 2 * window * (T + window)


@pytest.mark.parametrize("window, with_documents", [(None, False), (40, False), (40, True), (500, True)])
@pytest.mark.parametrize("heads, T", [((2, 2), 512), ((4, 2), 300), ((2, 1), 129), ((1, 1), 7)])
def test_cpu_attention_equals_the_reference(window, with_documents, heads, T, compiling, monkeypatch):
    """Values and all gradients, for lengths that are no multiple of what is done at a time."""
    inputs = tensors(2, *heads, T, 16)
    numbers = torch.stack([torch.arange(T) // 50, torch.arange(T) // 33]) if with_documents else None
    mask = window_mask(window, T, numbers, "cpu") if window else None
    want = gradients(attention(*inputs, mask), inputs)
    monkeypatch.setattr(train_gpt.F, "scaled_dot_product_attention", None)  # not taken any more
    got = gradients(train_gpt.cpu_attention(*inputs, mask), inputs)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("T, compiled, own", [(256, False, False), (2048, True, False), (1024, True, True)])
def test_cpu_attention_is_for_compiled_short_sequences(T, compiled, own, monkeypatch):
    inputs = tensors(1, 1, 1, T, 8)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, **__: "torch's")
    assert (train_gpt.cpu_kernel(*inputs, is_causal=True) == "torch's") != own


WINDOWS = [(1, True), (100, True), (127, False), (128, False), (200, True), (255, True), (256, True),
           (300, False), (510, False), (600, True)]


@pytest.mark.parametrize("window, with_documents", WINDOWS)
def test_gpu_window_mask_lists_the_blocks_that_are_seen(window, with_documents, compiling):
    """No block with a visible key is left out, none without is computed, and full ones are seen in whole. Two
    rows with documents are joined into one, neither of which sees the other."""
    T = 512
    documents = two_rows(T) if with_documents else None
    mask = train_gpt.gpu_window_mask(torch.tensor(window), T, documents, "cpu")
    want = torch.block_diag(*seen_by_each(window, T, documents)).bool()[None]
    T = want.size(1)
    n = T // 128
    assert T == (1024 if with_documents else 512) and mask.seq_lengths == (T, T)
    blocks = want.view(1, n, 128, n, 128).permute(0, 1, 3, 2, 4).flatten(3)

    def listed(counts, indices):
        dense = torch.zeros(1, n, n, dtype=torch.bool)
        for block in range(n):
            dense[0, block, indices[0, 0, block, :counts[0, 0, block]].long()] = True
        return dense

    for side, seen in ("kv", blocks), ("q", blocks.transpose(1, 2)):
        full, in_part = (
            listed(getattr(mask, f"{kind}{side}_num_blocks"), getattr(mask, f"{kind}{side}_indices"))
            for kind in ("full_", ""))
        assert torch.equal(full, seen.all(-1)) and torch.equal(full | in_part, seen.any(-1))
        assert not (full & in_part).any()
    index = [torch.arange(n).view(-1, *[1] * after) for n, after in ((1, 3), (1, 2), (T, 1), (T, 0))]
    assert torch.equal(mask.mask_mod(*index).expand(1, 1, T, T)[:, 0], want)


def test_no_cudnn_attention_with_a_mask(monkeypatch):
    """Its gradients have been NaN at some lengths. Without a mask torch may choose it."""
    backends = []

    def kernel(q, *args, **kw):
        backends.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(q, *args, **kw)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(train_gpt.attention, "__defaults__", (kernel,))
    monkeypatch.setattr(train_gpt.causal_attention, "__defaults__", (None, kernel))
    q, k, v = tensors(1, 2, 2, 64, 16)
    documents = torch.arange(64)[None] // 9
    for mask in (None, window_mask(8, 64, None, "cpu"), window_mask(63, 64, documents, "cpu")):
        got = train_gpt.gpu_attention(q, k, v, mask)
        torch.testing.assert_close(got, attention(q, k, v, mask))
    assert backends[::2] == [True, False, False] and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("window, T, compiled", [(torch.tensor(100), 512, False), (100, 500, True),
                                                 (511, 512, True), (512, 512, True)])
def test_gpu_window_mask_leaves_the_rest_to_the_reference(window, T, compiled, monkeypatch):
    """Evaluation and sampling, odd lengths, and the whole past, for which cuDNN is there."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    got = train_gpt.gpu_window_mask(window, T, None, "cpu")
    want = window_mask(int(window), T, None, "cpu")
    assert got is want is None or torch.equal(got, want)


# ------------------------------------------------------------ the loss
def head_and_tokens(dtype=torch.float32, tokens=96, C=32, V=64, size=0.2):
    draw = torch.Generator().manual_seed(tokens)
    x = F.rms_norm(torch.randn(3, tokens // 3, C, generator=draw), (C,)).to(dtype).requires_grad_()
    head = (torch.randn(V, C, generator=draw) * size).requires_grad_()
    return x, head, torch.randint(V, (3, tokens // 3), generator=draw)


def loss_and_gradients(loss, x, head, targets, cap, weights=None):
    """weights: of the losses on so many next targets."""
    if weights is not None:
        targets = train_gpt.next_targets(targets, len(weights))
    value = loss(x, head, targets, cap, weights)
    return [value, *torch.autograd.grad(3 * value, (x, head))]


CAPS = [(2.0, 0.0, 0.0), (15.0, 0.0, 0.0), (50.0, 0.0, 0.0), (11.5, 5.0, 15.0)]


@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 0.25)])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("dtype, size, most", [(torch.float32, 0.2, 2e-6), (torch.float32, 20.0, 2e-6),
                                               (torch.bfloat16, 0.2, 0.01)])
def test_fused_loss_equals_the_reference(cap, dtype, size, most, weights, compiling):
    """Value and gradients, also of logits far beyond the cap and of several targets; bf16 as far as it
    rounds."""
    x, head, targets = head_and_tokens(dtype, V=50, size=size)
    exact = x.detach().float().requires_grad_()
    weights = weights and torch.tensor(weights)
    want = loss_and_gradients(lm_loss, exact, head, targets, cap, weights)
    got = loss_and_gradients(train_gpt.fused_loss, x, head, targets, cap, weights)
    for mine, true in zip(got, want, strict=True):
        assert (mine - true).norm() <= most * true.norm()


def lm_loss_in_fp8(x, head, targets, cap, weights=None, most=train_gpt.HEAD_MOST):
    """lm_loss() of one target a token, with lm_head's product in fp8."""
    scales = train_gpt.head_scales(x.size(-1), targets.numel(), most)
    logits = train_gpt.softcap(train_gpt.fp8_linear(x, head, scales).float(), *cap)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("most", [train_gpt.HEAD_MOST, train_gpt.HEAD_MOST_BY_MAXIMUM])
def test_fused_loss_in_fp8_is_as_near_as_the_reference(most, compiling):
    x, head, targets = head_and_tokens(torch.bfloat16)
    exact = loss_and_gradients(lm_loss, x, head, targets, CAPS[1])
    off = [[((a - b).norm() / b.norm()).item() for a, b in
            zip(loss_and_gradients(partial(loss, most=most), x, head, targets, CAPS[1]), exact)]
           for loss in (train_gpt.fp8_fused_loss, lm_loss_in_fp8)]
    assert all(mine <= 1.2 * other + 0.005 for mine, other in zip(*off)) and max(off[0]) > 0.02
    dtypes = []

    def spy(*args):
        dtypes.append(args[-1])
        return train_gpt.row_losses(*args)

    train_gpt.fp8_fused_loss(x, head, targets, CAPS[1], row_losses=spy, most=most)
    assert dtypes == [torch.float8_e5m2]  # no gradient of logits size in bf16


@pytest.mark.slow      # compiles three graphs
def test_a_changed_loss_is_not_taken_from_the_compile_cache(tmp_path, monkeypatch):
    """compile_step() lets torch keep compiled graphs with FusedLoss; another backward pass must not meet
    them. That another Triton kernel does not, test_static_gpu.py shows."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    old = "return losses, (error * part * (1 - part) * (top * scale * factor)).to(dtype)"
    other = load_module(planted(tmp_path, old, old.replace("(top", "(3 * top")), "other")
    draw = torch.Generator().manual_seed(0)
    targets = torch.arange(6)[None]
    x = torch.randn(1, 6, 8, generator=draw).requires_grad_()
    head = torch.randn(40, 8, generator=draw)
    hits = torch._dynamo.utils.counters["aot_autograd"]

    def gradient(module):
        torch._dynamo.reset()
        before = hits["autograd_cache_hit"]
        loss = torch.compile(lambda x: module.fused_loss(x, head, targets, CAPS[1]))(x)
        return torch.autograd.grad(loss, x)[0], hits["autograd_cache_hit"] - before

    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
        found = [gradient(module) for module in (train_gpt, train_gpt, other)]
    (first, _), (again, hit), (changed, missed) = found
    assert torch.equal(first, again) and hit == 1
    assert torch.allclose(changed, 3 * first, atol=1e-5) and missed == 0


@pytest.mark.parametrize("cap, compiled, fused", [
    (0.0, True, False), (51.0, True, False), (15.0, False, False), (50.0, True, True)])
def test_fused_loss_leaves_the_rest_to_the_reference(cap, compiled, fused, monkeypatch):
    """Without a moderate cap or a compiler. What makes losses and gradients of the logits can be given."""
    x, head, targets = head_and_tokens()
    taken = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    monkeypatch.setattr(train_gpt, "lm_loss", lambda *_: "reference")
    monkeypatch.setattr(train_gpt.FusedLoss, "apply", lambda *args: taken.append(args) or "fused")
    got = train_gpt.fused_loss(x, head, targets, (cap, 0.0, 0.0), row_losses="kernel")
    assert got == ("fused" if fused else "reference") and len(taken) == fused
    assert not fused or taken[0][-1] == "kernel"


# ------------------------------------------------------------ the choice
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("preset, fp8, in_fp8", [
    ("speedrun", "off", set()), ("speedrun", "head", set()), ("gpt2", "all", {"linear"}),
    ("tiny", None, {"losses"}), ("golf", None, set()),
    ("speedrun_plus", "all", {"qkv", "mlp"})])
def test_fast_versions_have_the_signature_of_the_readable(on_gpu, preset, fp8, in_fp8, monkeypatch):
    """The same arguments in the same order, any other has a default; and each device gets its own."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(train_gpt, "triton", True)      # or as in builds without CUDA
    cfg = preset_config(preset)
    replaced = set()
    if fp8:
        cfg = replace(cfg, fp8=fp8)
    own = {"kernel", "width"}   # of readable functions, which no recipe gives through its kernels
    fast = cfg.choose_kernels(on_gpu, lambda line: None)
    for name, readable in vars(type(fast)()).items():
        mine = getattr(fast, name)
        arguments = [argument for argument in inspect.signature(readable).parameters if argument not in own]
        found = inspect.signature(mine).parameters
        assert list(found)[:len(arguments)] == arguments, name
        assert all(found[more].default is not inspect.Parameter.empty for more in found.keys() - {*arguments})
        if mine is not readable:
            replaced.add(name)
    windows = {"window", "window_mask"} if on_gpu and preset != "golf" else set()
    others = set() if preset == "golf" else {"loss"}    # golf has torch's
    if on_gpu and preset != "golf" or preset == "tiny":
        others.add("attention")
    assert replaced == in_fp8 | others | windows


@pytest.mark.parametrize("preset, triton, settings, least, expected", [
    ("golf_plus", None, {}, None, "reference"),     # as in builds without CUDA
    ("golf_plus", True, dict(triton_kernels=False), None, "reference"),
    ("golf", True, {}, None, "reference"),          # which Inductor compiles
    ("tiny", True, {}, None, "fused"),              # a small vocabulary
    ("tiny", True, {}, 0, "kernel"),                # as toys can have it, too
    ("golf_plus", True, {}, None, "kernel"),
    ("speedrun", True, dict(fp8="off"), None, "kernel")])
def test_which_loss_a_gpu_gets(preset, triton, settings, least, expected, monkeypatch):
    monkeypatch.setattr(train_gpt, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    if least is not None:
        monkeypatch.setattr(train_gpt, "LEAST_KERNEL_VOCABULARY", least)
    loss = replace(preset_config(preset), **settings).choose_kernels(True, lambda line: None).loss
    assert getattr(loss, "func", loss) is (lm_loss if expected == "reference" else train_gpt.fused_loss)
    by_kernel = dict(row_losses=train_gpt.kernel_losses)
    assert getattr(loss, "keywords", {}) == (by_kernel if expected == "kernel" else {})


def test_each_stage_has_one_context(train, monkeypatch):
    """Its tables go to the device once: a GPU's host would wait for them at every step."""
    real = train_gpt.train_step
    tables = []

    def step(loss_fn, optimizer, batch, micro, context, *more):
        tables.append(context.rope[0])
        return real(loss_fn, optimizer, batch, micro, context, *more)

    monkeypatch.setattr(train_gpt, "train_step", step)
    done = train(TOY, ITERATIONS="6", WINDOW_SCHEDULE="16,32", BATCH_SCHEDULE="1,2", VAL_LOSS_EVERY="2")
    assert done.code == 0 and len(tables) == 2 + 6      # the first two are of the warmup
    assert len({id(table) for table in tables[2:]}) == 2


# ------------------------------------------------------------ compiled, by a back end that only traces
@torch.no_grad()
@pytest.mark.parametrize("preset, backend, settings", [
    slow("speedrun", "aot_eager", dict(window_pattern="SL", max_doc_len=256,
                                       window_schedule=(200,), num_layers=2, value_embed_layers=(1, 0))),
    ("gpt2", "eager", dict(window_pattern="SL", window_schedule=(200,), num_layers=2, depth=0))])
def test_a_model_with_the_gpus_kernels_compiles_in_one_piece(preset, backend, settings, monkeypatch):
    """Masks are made inside the compiled step, in speedrun by the batch's documents."""
    monkeypatch.setattr(train_gpt, "triton", None)      # no kernel runs on a CPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cfg = RECIPES[preset](**SMALL | dict(train_seq_len=256, bos_id=1) | settings)
    fast = cfg.choose_kernels(True, lambda line: None)
    fast = replace(fast, linear=linear, loss=train_gpt.fused_loss)
    models = [cfg.make_model(), cfg.make_model(fast)]
    for model in models:
        init_parameters(model, 0)
        torch.nn.init.normal_(model.head, 0, 0.1, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(2, 512, (2, 257), generator=torch.Generator().manual_seed(1))
    tokens[:, ::50] = 1
    compiled = torch.compile(models[1], backend=backend, fullgraph=True, dynamic=False)
    context = models[0].context(256, torch.device("cpu"), stage=cfg.stages()[0])
    want = models[0](tokens[:, :-1], tokens[:, 1:], context)
    limits = {kind: torch.tensor(size) for kind, size in context.windows.items()}  # as on a GPU
    got = compiled(tokens[:, :-1], tokens[:, 1:], context._replace(windows=limits))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
