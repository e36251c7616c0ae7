"""Fast versions of the seams of train_gpt.py, which trains without them, only slower.

They stand in a file of their own so that a golfer, who pays for each byte that is loaded, can leave them out.
Each has the signature of what it replaces and a reference that a test holds it against; beside it stands its
measured gain (records/BENCH.md), or that it is not measured yet. Importing this needs no GPU and no Triton.
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens: what flex attention computes or skips at a time
LOGITS = 1 << 28  # of one part of the head's loss: 512 MiB in bf16


def to_fp8(x, scale, dtype):
    """x -> fp8 and what to multiply it by, 0-dim. scale: a number, or None: max |x| fills the range."""
    x, top = x.float(), torch.finfo(dtype).max
    scale = (x.abs().amax() / top).clamp(1e-30) if scale is None else x.new_full((), scale)
    return (x / scale).clamp(-top, top).to(dtype), scale  # a bare cast can give inf or nan


def scaled_mm(a, b, scale_a, scale_b, fast=False):
    """a (M, K), b (N, K) -> scale_a a @ (scale_b b).T in bf16. The layout is CUDA's; a CPU takes any."""
    assert not any(side % 16 for side in (*a.shape, *b.shape)), "sides must be multiples of 16"
    a, b = a.contiguous(), b.contiguous().t()
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def fp8_product(x, weight, scales):
    """x (N, K) @ weight (M, K).T in e4m3 -> (product, what fp8_gradients needs)."""
    (x, sx), (w, sw) = (to_fp8(*pair, torch.float8_e4m3fn) for pair in zip((x, weight), scales))
    return scaled_mm(x, w, sx, sw, fast=True), (x, w, sx, sw)


def fp8_gradients(grad, kept, scale):
    """By x and by weight, of products with the gradient in e5m2 (arXiv:2209.05433)."""
    x, w, sx, sw = kept
    g, sg = to_fp8(grad, scale, torch.float8_e5m2)
    return scaled_mm(g, w.t(), sg, sw), scaled_mm(g.t(), x.t(), sg, sx)


class Fp8Linear(torch.autograd.Function):
    """`linear` by the two above. scales of x, weight and gradient, None: by the maximum."""
    @staticmethod
    def forward(ctx, x, weight, scales):
        y, kept = fp8_product(x, weight, scales[:2])
        ctx.save_for_backward(*kept)
        ctx.grad_scale = scales[2]
        return y

    @staticmethod
    def backward(ctx, grad):
        dx, dw = fp8_gradients(grad, ctx.saved_tensors, ctx.grad_scale)
        return dx.to(grad.dtype), dw.float(), None


def fp8_linear(x, weight, scales=(None, None, None)):
    """`linear` in fp8, but where no gradient is wanted: scores are exact."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype))
    return Fp8Linear.apply(x.flatten(0, -2), weight, scales).to(x.dtype).view(*x.shape[:-1], len(weight))


def head_scales(C, tokens):
    """Fixed ones for x of unit rms, |weight| to 0.87 and a loss that is a mean over so many tokens."""
    return C ** 0.5 / 448, 2 ** -9, 1 / 448 / tokens


def fp8_head(x, weight):
    return fp8_linear(x, weight, head_scales(x.size(-1), x[..., 0].numel()))


# The constant fp8 of train_gpt.py: what multiplies in blocks and in the head, None: nothing of this file.
FP8 = {"off": (None, None), "head": (None, fp8_head), "all": (fp8_linear, fp8_linear)}


def choose_fp8(t, cfg, on_gpu, log):
    """(What multiplies in blocks, in the head) for cfg.fp8; auto-: where it is fast, on a GPU that can.
    t: the trainer's module. Raises its Refused."""
    sides = {name: getattr(cfg, name) for name in ("vocab_size", "train_seq_len", "model_dim")}
    sides["head_dim"] = cfg.model_dim // cfg.num_heads
    capability = torch.cuda.get_device_capability() if on_gpu else None
    able = (capability is None or capability >= (8, 9)) and not any(n % 16 for n in sides.values())
    part = cfg.fp8.removeprefix("auto-")
    if part != cfg.fp8:
        part = part if able and on_gpu else "off"
    else:
        t.demand(able, f"fp8={part} needs compute capability 8.9, here {capability}, and multiples of 16, "
                       f"but {', '.join(f'{name}={n}' for name, n in sides.items())}")
    log(f"fp8: {cfg.fp8} is {part}")
    return tuple(fast or t.linear for fast in FP8[part])


def cpu_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """scaled_dot_product_attention in compiled steps on a CPU: a quarter of the queries at a time, with the
    keys up to the last of them. Plain products and a fused softmax are faster there than torch's kernel
    (a step of `tiny`: 99 ms, 123 without), but they keep all weights, so long sequences stay with torch."""
    T, K, parts = q.size(2), k.size(2), []
    if T > 1024 or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale,
                                              enable_gqa=enable_gqa)
    if is_causal:
        attn_mask = torch.ones(T, K, dtype=torch.bool, device=q.device).tril()
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    step = max(128, T // 4)
    for low in range(0, T, step):
        here, seen = slice(low, low + step), slice(max(0, K - T + low + step))
        scores = (q[:, :, here] @ k[:, :, seen].mT).float() * (scale or q.size(-1) ** -0.5)
        weights = scores.masked_fill(~attn_mask[..., here, seen], -torch.inf).softmax(-1)
        parts.append(weights.to(q.dtype) @ v[:, :, seen])
    return torch.cat(parts, 2)


def cpu_loss(t, x, head, targets, cap, linear):
    """lm_loss in compiled steps on a CPU. Capped logits need no maximum before exp, and the target's is
    picked before the cap, so one pass makes the loss and nothing of their size is kept in fp32.
    (A step of `tiny`: 99 ms, 101 without; with 2,048 pieces 150, 158 without.)"""
    if not (torch.compiler.is_compiling() and 0 < cap <= 50):
        return t.lm_loss(x, head, targets, cap, linear)
    logits = linear(x, head).float()
    picked = torch.where(torch.arange(len(head), device=x.device) == targets[..., None], logits, 0).sum(-1)
    return (t.softcap(logits, cap).exp().sum(-1).log() - t.softcap(picked, cap)).mean()


# On a GPU ------------------------------------------------------------------------------------------------
def gpu_window_mask(t, reach, T, documents, device, first=0):
    """window_mask in compiled steps on a GPU: a BlockMask for flex attention, None for the whole past. Which
    blocks of a row are seen follows from the documents at their ends, which grow along it. Not measured."""
    whole = reach >= T and documents is None
    if whole or first or T % BLOCK or not torch.compiler.is_compiling():
        return t.window_mask(reach, T, documents, device, first)
    n = T // BLOCK
    block = torch.arange(n, device=device)
    far = (block[:, None] - block) * BLOCK  # from the beginning of the keys' to that of the queries'
    seen, full = (far >= 0) & (far - BLOCK + 1 < reach), (far > 0) & (far + BLOCK - 1 < reach)
    if documents is not None:
        begin, end = documents[:, ::BLOCK], documents[:, BLOCK - 1::BLOCK]
        seen = seen & (end[:, None] >= begin[:, :, None])
        full = full & (begin[:, None] == end[:, :, None])
    full, seen = (x.view(-1, 1, n, n) for x in (full, seen & ~full))

    def mask_mod(b, h, query, key):
        near = (key <= query) & (query - key < reach)
        return near if documents is None else near & (documents[b, query] == documents[b, key])

    lists = [x.int().sort(descending=True, stable=True) for x in (seen, full)]
    lists = [part for ones, order in lists for part in (ones.sum(-1).int(), order.int())]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask_mod)


def gpu_attention(t, q, k, v, mask, scale=None):
    """attention for such masks, and for the whole past by cuDNN, where it can. Not measured."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=k.size(1) < q.size(1))
    if mask is not None:
        return t.attention(q, k, v, mask, scale)
    order = "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"
    with sdpa_kernel([getattr(SDPBackend, name) for name in order], set_priority=True):
        return t.attention(q, k, v, None, scale)


class LossInParts(torch.autograd.Function):
    """lm_loss with its gradients made at once, a part of the tokens at a time, so that logits never
    stand for the whole batch. x (N, C), targets (N,); products: as of plain_head."""
    @staticmethod
    def forward(ctx, x, head, targets, cap, parts, products):
        total, dx, dhead = 0.0, [], torch.zeros_like(head, dtype=torch.float32)
        for x, targets in zip(x.chunk(parts), targets.chunk(parts)):
            logits, gradients = products(x, head)
            logits = logits.float()
            capped = cap * torch.tanh(logits / cap) if cap else logits
            norm = capped.logsumexp(-1, keepdim=True)
            mine = torch.arange(len(head), device=x.device) == targets[:, None]
            total = total + (norm[:, 0] - torch.where(mine, capped, 0).sum(-1)).sum()
            slope = 1 - (capped / cap).square() if cap else 1
            grad = ((capped - norm).exp() - mine.float()) * slope / (parts * len(x))
            by_x, by_head = gradients(grad.to(x.dtype))
            dx.append(by_x.to(x.dtype))
            dhead = dhead + by_head
        ctx.save_for_backward(torch.cat(dx), dhead)
        return total / (parts * len(x))

    @staticmethod
    def backward(ctx, grad):
        dx, dhead = ctx.saved_tensors
        return grad * dx, grad * dhead, None, None, None, None


def plain_head(x, head):
    """x (N, C), head (V, C) -> logits, (gradient of the logits -> those of x and of head)."""
    w = head.to(x.dtype)
    return x @ w.T, lambda grad: (grad @ w, grad.T @ x)


def quantised_head(scales, x, head):
    """plain_head in fp8."""
    logits, kept = fp8_product(x, head, scales[:2])
    return logits, lambda grad: fp8_gradients(grad, kept, scales[2])


def gpu_loss(t, x, head, targets, cap, linear):
    """lm_loss where the logits are many, in equal parts. Not measured."""
    tokens = targets.numel()
    unit = 16 if tokens % 16 == 0 else 1  # fp8 asks for sides of 16
    parts = next(n for n in range(1, tokens + 1)
                 if tokens % (n * unit) == 0 and (tokens // n * len(head) <= LOGITS or tokens == n * unit))
    if parts == 1:
        return t.lm_loss(x, head, targets, cap, linear)
    scales = head_scales(x.size(-1), tokens) if linear is fp8_head else (None,) * 3
    products = plain_head if linear is t.linear else partial(quantised_head, scales)
    return LossInParts.apply(x.flatten(0, -2), head, targets.flatten(), cap, parts, products)


def choose(t, cfg, on_gpu, log):
    """The seams as they are fastest here. t: the trainer's module. Raises its Refused."""
    linears = (t.linear, t.linear) if cfg.fp8 == "off" else choose_fp8(t, cfg, on_gpu, log)
    if on_gpu:
        return t.Fast(*linears, partial(gpu_window_mask, t), partial(gpu_attention, t), partial(gpu_loss, t))
    return t.Fast(*linears, attention=partial(t.attention, kernel=cpu_attention), loss=partial(cpu_loss, t))
