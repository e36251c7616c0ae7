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


@pytest.mark.parametrize("settings, taken", [
    (dict(), True), (dict(artifact_bytes_limit=10**7), True), (dict(fp8="all"), True), (dict(), False)])
def test_a_cpu_gets_it_if_it_is_there(settings, taken, tiny_data, monkeypatch):
    cfg = toy_config(tiny_data, **dict(vocab_size=512) | settings)
    if not taken:
        monkeypatch.setattr(train_gpt, "find_spec", lambda name: None)
    made = train_gpt.fast_kernels(cfg, train_gpt.Team(cfg, {}), lambda *_: None)
    if taken:
        assert made.attention.keywords == {"kernel": kernels.cpu_attention}
        assert made.loss.func is kernels.cpu_loss and made.window_mask is train_gpt.window_mask
    else:
        assert made == train_gpt.Fast()


def test_a_gpu_gets_its_own(tiny_data):
    cfg = toy_config(tiny_data, vocab_size=512)
    team = train_gpt.Team(cfg, {})
    team.on_gpu = True
    made = train_gpt.fast_kernels(cfg, team, print)
    assert (made.linear, made.head_linear) == (train_gpt.linear,) * 2
    assert [seam.func for seam in made[2:]] == [
        kernels.gpu_window_mask, kernels.gpu_attention, kernels.gpu_loss]


def test_without_kernels_a_run_says_so(tiny_data, monkeypatch):
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: None)
    cfg = toy_config(tiny_data, vocab_size=512)
    assert train_gpt.fast_kernels(cfg, train_gpt.Team(cfg, {}), print) == train_gpt.Fast()


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


# ------------------------------------------------------------------------ of a GPU, by what a CPU can tell
REACHES = [(1, True), (100, True), (128, False), (200, True), (256, True), (300, False), (600, True)]


def two_rows(T):
    """Documents of many lengths, one that ends with a block, one longer than all windows."""
    lengths = torch.tensor([[7, 121, 128, 1, 300, T], [T, 0, 0, 0, 0, 0]])
    begins = torch.zeros(2, T + 1, dtype=torch.long)
    for row, some in zip(begins, lengths):
        row[some.cumsum(0).clamp(max=T)] = 1
    return begins[:, :T].cumsum(1)


def brute(reach, T, documents):
    """What each query may see, (rows, T, T)."""
    query, key = torch.arange(T)[:, None], torch.arange(T)
    seen = ((key <= query) & (query - key < reach))[None]
    return seen if documents is None else seen & (documents[:, :, None] == documents[:, None])


@pytest.mark.parametrize("reach, with_documents", REACHES)
def test_gpu_window_mask_lists_the_blocks_that_are_seen(reach, with_documents, monkeypatch):
    """No block with a visible key is left out, none without is computed, and full ones are seen in whole."""
    T, documents = 512, two_rows(512) if with_documents else None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    mask = kernels.gpu_window_mask(train_gpt, reach, T, documents, "cpu")
    want, rows = brute(reach, T, documents), 2 if with_documents else 1
    blocks = want.view(rows, 4, 128, 4, 128).permute(0, 1, 3, 2, 4).flatten(3)

    def listed(counts, indices):
        dense = torch.zeros(rows, 4, 4, dtype=torch.bool)
        for place in torch.cartesian_prod(torch.arange(rows), torch.arange(4)).tolist():
            row, block = place
            dense[row, block, indices[row, 0, block, :counts[row, 0, block]].long()] = True
        return dense

    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial_ = listed(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full, blocks.all(-1)) and torch.equal(full | partial_, blocks.any(-1))
    assert not (full & partial_).any()
    index = [torch.arange(n).view(-1, *[1] * after) for n, after in ((rows, 3), (1, 2), (T, 1), (T, 0))]
    assert torch.equal(mask.mask_mod(*index).expand(rows, 1, T, T)[:, 0], want)


@torch.no_grad()
@pytest.mark.parametrize("reach, with_documents", REACHES)
def test_gpu_attention_equals_the_reference(reach, with_documents, monkeypatch):
    """flex attention in its eager form; a CPU has no backward of it."""
    T, documents = 512, two_rows(512) if with_documents else None
    q, k, v = (x.detach() for x in tensors(2, 4, 2, T, 16))
    want = train_gpt.attention(q, k, v, train_gpt.window_mask(reach, T, documents, "cpu"), 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        mask = kernels.gpu_window_mask(train_gpt, reach, T, documents, "cpu")
    assert (mask is None) == (reach >= T and not with_documents)
    got = kernels.gpu_attention(train_gpt, q, k, v, mask, 0.2)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reach, T, documents, first, compiling", [
    (100, 512, None, 0, False), (100, 500, None, 0, True), (100, 512, None, 9, True),
    (512, 512, None, 0, True)])
def test_gpu_window_mask_leaves_the_rest_to_the_reference(reach, T, documents, first, compiling, monkeypatch):
    """Evaluation and sampling, odd lengths, and the whole past, for which cuDNN is there."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    got = kernels.gpu_window_mask(train_gpt, reach, T, documents, "cpu", first)
    want = train_gpt.window_mask(reach, T, documents, "cpu", first)
    assert got is want is None or torch.equal(got, want)


def head_and_tokens(dtype, tokens=96, C=32, V=64):
    draw = torch.Generator().manual_seed(tokens)
    x = F.rms_norm(torch.randn(3, tokens // 3, C, generator=draw), (C,)).to(dtype).requires_grad_()
    head = (torch.randn(V, C, generator=draw) * 0.2).requires_grad_()
    return x, head, torch.randint(V, (3, tokens // 3), generator=draw)


def loss_and_gradients(loss, x, head, targets, cap, linear):
    value = loss(x, head, targets, cap, linear)
    return [value, *torch.autograd.grad(3 * value, (x, head))]


@pytest.mark.parametrize("cap", [0.0, 2.0, 15.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gpu_loss_equals_the_reference(cap, dtype, tolerance, monkeypatch):
    """Value and gradients, in six parts, with logits at the cap."""
    x, head, targets = head_and_tokens(dtype)
    want = loss_and_gradients(train_gpt.lm_loss, x.float().detach().requires_grad_(), head, targets, cap,
                              train_gpt.linear)
    monkeypatch.setattr(kernels, "LOGITS", 16 * len(head))
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "lm_loss", None)  # not taken
        mine = partial(kernels.gpu_loss, train_gpt)
        got = loss_and_gradients(mine, x, head, targets, cap, train_gpt.linear)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()
    assert got[1].dtype == dtype and got[2].dtype == torch.float32


@pytest.mark.parametrize("linear", [kernels.fp8_head, kernels.fp8_linear])
def test_gpu_loss_in_fp8_equals_its_whole(linear, monkeypatch):
    """In parts it errs no more than the head in fp8 does on the whole batch."""
    x, head, targets = head_and_tokens(torch.bfloat16)
    exact, whole = (loss_and_gradients(train_gpt.lm_loss, x, head, targets, 15.0, product)
                    for product in (train_gpt.linear, linear))
    monkeypatch.setattr(kernels, "LOGITS", 32 * len(head))
    parts = loss_and_gradients(partial(kernels.gpu_loss, train_gpt), x, head, targets, 15.0, linear)
    for mine, theirs, true in zip(parts, whole, exact, strict=True):
        assert 0 < (mine - true).norm() < 1.3 * (theirs - true).norm() + 0.01 * true.norm()


def test_gpu_loss_of_few_logits_is_the_reference():
    x, head, targets = head_and_tokens(torch.float32)
    same = [loss(x, head, targets, 15.0, train_gpt.linear)
            for loss in (train_gpt.lm_loss, partial(kernels.gpu_loss, train_gpt))]
    assert torch.equal(*same)


@torch.no_grad()
def test_a_model_with_the_gpus_masks_compiles_in_one_piece(tiny_data):
    """Masks are made of the batch's documents inside the compiled step; the loss equals the reference's."""
    cfg = toy_config(tiny_data, vocab_size=512, train_seq_len=256, max_doc_len=256, bos_id=1,
                     window_pattern="SL", window_schedule=(200,))
    fast = kernels.choose(train_gpt, cfg, True, print)
    models = [train_gpt.GPT(cfg), train_gpt.GPT(cfg, fast=fast)]
    for model in models:
        train_gpt.init_parameters(model, 0)
        torch.nn.init.normal_(model.head, 0, 0.1, generator=torch.Generator().manual_seed(0))
        model.set_context(256, 200)
    tokens = torch.randint(2, 512, (2, 257), generator=torch.Generator().manual_seed(1))
    tokens[:, ::50] = 1
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=True, dynamic=False)
    want, got = (model(tokens[:, :-1], tokens[:, 1:]) for model in (models[0], compiled))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("linear", [train_gpt.linear, kernels.fp8_head])
def test_gpu_loss_compiles_in_one_piece(linear, monkeypatch):
    monkeypatch.setattr(kernels, "LOGITS", 48 * 64)
    args = (*head_and_tokens(torch.bfloat16), 15.0, linear)
    loss = partial(kernels.gpu_loss, train_gpt)
    compiled = torch.compile(lambda *args: loss(*args), backend="aot_eager", fullgraph=True, dynamic=False)
    got, want = (loss_and_gradients(one, *args) for one in (compiled, loss))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-2)
