"""Fast versions of the seams of train_gpt.py, which trains without them, only slower.

They stand in a file of their own because golf, which pays for each byte of train_gpt.py, uses none of them.
Each has the signature of what it replaces, a reference that a test holds it against, and its measured gain,
or the words that it is not measured yet. Importing this needs neither a GPU nor Triton.
"""
from functools import partial

import torch
import torch.nn.functional as F


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


class Fp8Linear(torch.autograd.Function):
    """Products in e4m3, those of the gradient with e5m2 (arXiv:2209.05433)."""
    @staticmethod
    def forward(ctx, x, weight, scales):
        *scales, ctx.grad_scale = scales
        (x, sx), (w, sw) = (to_fp8(*pair, torch.float8_e4m3fn) for pair in zip((x, weight), scales))
        ctx.save_for_backward(x, w, sx, sw)
        return scaled_mm(x, w, sx, sw, fast=True)

    @staticmethod
    def backward(ctx, grad):
        x, w, sx, sw = ctx.saved_tensors
        g, sg = to_fp8(grad, ctx.grad_scale, torch.float8_e5m2)
        return scaled_mm(g, w.t(), sg, sw).to(grad.dtype), scaled_mm(g.t(), x.t(), sg, sx).float(), None


def fp8_linear(x, weight, scales=(None, None, None)):
    """`linear` in fp8, but where no gradient is wanted: scores are exact. scales of x, weight and gradient;
    None: by the maximum."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype))
    return Fp8Linear.apply(x.flatten(0, -2), weight, scales).to(x.dtype).view(*x.shape[:-1], len(weight))


def fp8_head(x, weight):
    """With fixed scales, for x of unit rms, |weight| to 0.87 and a loss that is a mean over the tokens."""
    return fp8_linear(x, weight, (x.size(-1) ** 0.5 / 448, 2 ** -9, 1 / 448 / x[..., 0].numel()))


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
    (BENCH.md), but they keep all weights, so long sequences stay with torch."""
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
    picked before the cap, so one pass makes the loss and nothing of their size is kept in fp32."""
    if not (torch.compiler.is_compiling() and 0 < cap <= 50):
        return t.lm_loss(x, head, targets, cap, linear)
    logits = linear(x, head).float()
    picked = torch.where(torch.arange(len(head), device=x.device) == targets[..., None], logits, 0).sum(-1)
    return (t.softcap(logits, cap).exp().sum(-1).log() - t.softcap(picked, cap)).mean()


def choose(t, cfg, on_gpu, log):
    """What multiplies in blocks, what in the head; of CPUs attention's kernel, the loss. t: the trainer's
    module. Raises its Refused."""
    linears = (t.linear, t.linear) if cfg.fp8 == "off" else choose_fp8(t, cfg, on_gpu, log)
    return linears if on_gpu else (*linears, cpu_attention, partial(cpu_loss, t))
