"""What a card computes, against fp32 in slices, at the size of one rank of eight: attention, the loss and fp8
products. Each function says a verdict by its subject's report.
"""

import math
from functools import partial

import torch
from torch import Tensor

from tools.gpu.parts import ON_STAND_IN, Call, attention_inputs, by_kernels, loss_inputs
from tools.gpu.subject import Subject
from tools.run import plan

MOST_ERROR = 0.02  # relative, of a result in bf16
MOST_ERROR_FP8 = 0.10


def slice_size(subject):
    """How many rows of a score matrix are computed at once in fp32."""
    return 64 if subject.toy else 512


def has_fp8(run) -> bool:
    """Are some of a training step's products in fp8? golf knows none."""
    return plan.fp8_part(run.cfg, run.team.on_gpu) != "off"


def exact_attention(call: Call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, size: int) -> list[Tensor]:
    """Output and gradients of q, k and v in fp32, for `size` queries of a row at a time."""
    B, H, T, _ = q.shape
    groups = H // k.size(1)
    y = torch.zeros_like(grad, dtype=torch.float32)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for row in range(B):
        for low in range(0, T, size):
            high = min(T, low + size)
            first = max(0, low - call.window)
            query = torch.arange(low, high, device=q.device)[:, None]
            key = torch.arange(first, high, device=q.device)
            seen = (key <= query) & (query - key <= call.window)
            if call.documents is not None:
                own = call.documents[row % len(call.documents)]
                seen = seen & (own[low:high, None] == own[first:high])
            places = [slice(low, high), slice(first, high), slice(first, high)]
            inputs = []
            for x, place in zip((q, k, v), places):
                inputs.append(x[row, :, place].float().requires_grad_())
            keys = inputs[1].repeat_interleave(groups, 0)
            values = inputs[2].repeat_interleave(groups, 0)
            scores = (inputs[0] @ keys.mT).masked_fill(~seen, -torch.inf)
            part = scores.softmax(-1) @ values
            y[row, :, low:high] = part.detach()
            found = torch.autograd.grad(part, inputs, grad[row, :, low:high].float())
            for whole, its, place in zip(grads, found, places):
                whole[row, :, place] += its
    return [y, *grads]


def with_gradients(function: object, inputs: list[Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """The value of function(*inputs) and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs, grad)]


def relative_errors(mine: list[Tensor], exact: list[Tensor]) -> list[float]:
    found = []
    for a, b in zip(mine, exact, strict=True):
        found.append(float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)))
    return found


def judge(subject: Subject, what: str, errors: dict[str, float], most: float) -> None:
    """A verdict on relative errors; not a number is a fault, too."""
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    good = all([error < most for error in errors.values()])
    figures = {name: round(error, 6) for name, error in errors.items()}
    if ON_STAND_IN:
        subject.report.say("note", f"{what}: ran; there are no numbers here")
        return
    subject.report.say(
        "ok" if good else "FAULT",
        f"{what}: off from fp32 by {errors[worst]:.2%} ({worst}), at most {most:.0%} allowed",
        most=most,
        **figures,
    )


def attention_numbers(subject: Subject, run, call: Call) -> None:
    """Attention as the step computes it, forward and backward, and which kernel that was."""
    *inputs, grad = attention_inputs(run, call)
    exact = exact_attention(call, *inputs, grad, slice_size(subject))
    fast = subject.compiled(by_kernels(run.model.kernels, call, run.team.device))
    mine = with_gradients(fast, inputs, grad)
    errors = dict(zip(("output", "grad q", "grad k", "grad v"), relative_errors(mine, exact)))
    judge(subject, call.name(), errors, MOST_ERROR)


def exact_loss(
    subject: Subject,
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    cap: tuple[float, float, float],
    weights: Tensor | None,
) -> list[Tensor]:
    """The loss in fp32 and the gradients of x (1, N, C) and head (V, C), for some rows at a time."""
    N = x.size(1)
    size = 4 * slice_size(subject)
    total = torch.zeros((), device=x.device)
    grad_x = torch.zeros_like(x, dtype=torch.float32)
    grad_head = torch.zeros_like(head, dtype=torch.float32)
    for low in range(0, N, size):
        part = x[:, low : low + size].float()
        share = part.size(1) / N
        loss = partial(
            subject.trainer.lm_loss, targets=targets[:, low : low + size], cap=cap, weights=weights
        )
        value, its_x, its_head = with_gradients(loss, [part, head.float()])
        total += share * value
        grad_x[:, low : low + size] = share * its_x
        grad_head += share * its_head
    return [total, grad_x, grad_head]


def loss_numbers(subject: Subject, run, loss_args: tuple) -> None:
    """lm_head and loss as the step computes them; the last rows are those beyond 2^31 logits."""
    x, head, targets = loss_inputs(run, loss_args)
    cap, *more = loss_args[3:]
    weights = more[0] if more else None

    def loss(x: Tensor, head: Tensor) -> Tensor:
        return run.model.kernels.loss(x, head, targets, cap, *more)

    exact = exact_loss(subject, x, head, targets, cap, weights)
    mine = with_gradients(subject.compiled(loss), [x, head])
    errors = dict(zip(("loss", "grad x", "grad head"), relative_errors(mine, exact)))
    tail = [mine[1][:, -64:]], [exact[1][:, -64:]]
    errors["grad x, last rows"] = relative_errors(*tail)[0]
    most = MOST_ERROR_FP8 if has_fp8(run) else MOST_ERROR
    judge(subject, f"loss of {x.size(1):,} x {len(head):,} logits", errors, most)


def fp8_numbers(subject: Subject, run, loss_args: tuple) -> None:
    """scaled_mm in its three layouts, at the size of lm_head."""
    trainer = subject.trainer
    x, head, _ = loss_inputs(run, loss_args)
    x = x[0]
    rows = x[: len(x) // 16 * 16]
    draw = torch.Generator(x.device).manual_seed(3)
    grad = torch.randn((len(rows), len(head)), device=x.device, generator=draw, dtype=torch.float32)
    grad = grad.to(run.team.dtype)
    y, kept = trainer.fp8_product(rows, head, (None, None))
    grad_x, grad_head = trainer.fp8_gradients(grad, kept, None)
    errors = {"output": 0.0, "grad x": 0.0}
    size = 4 * slice_size(subject)
    exact_head = torch.zeros_like(head)
    ends = [0, max(0, len(rows) - size)]  # the first and the last rows
    for low in range(0, len(rows), size):
        exact_head += grad[low : low + size].float().T @ rows[low : low + size].float()
        if low in ends or low + size >= len(rows):
            part = slice(low, low + size)
            wanted = [rows[part].float() @ head.T, grad[part].float() @ head]
            for name, error in zip(errors, relative_errors([y[part], grad_x[part]], wanted)):
                errors[name] = max(errors[name], error)
    errors["grad weight"] = relative_errors([grad_head], [exact_head])[0]
    judge(subject, f"fp8 products {len(rows):,} x {x.size(1)} x {len(head):,}", errors, MOST_ERROR_FP8)
