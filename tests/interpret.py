"""The Triton kernel against its reference, by Triton's interpreter:

    TRITON_INTERPRET=1 python tests/interpret.py

Then the golden tests with it in place of lm_loss. Exit code 1 where loss or gradients differ.
test_static_gpu.py runs it, as a CUDA build of torch has Triton.
"""

import sys
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402

import golden_common  # noqa: E402
import test_golden  # noqa: E402
import train_gpt  # noqa: E402
from test_kernels import head_and_tokens, lm_loss_in_fp8  # noqa: E402
from train_gpt import HEAD_MOST, HEAD_MOST_BY_MAXIMUM, lm_loss  # noqa: E402


def found(loss, x, head, targets):
    """Value and gradients, of three times the loss."""
    value = loss(x, head, targets)
    return [value.detach(), *torch.autograd.grad(3 * value, (x, head))]


def errors(mine, exact):
    return [float((a - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True)]


def several(targets, weights):
    """The next targets of each token, as many as there are weights of losses on them."""
    return targets if weights is None else train_gpt.next_targets(targets, len(weights))


def fused(cap, most, x, head, targets, weights=None):
    """most: of fp8; None: not in fp8."""
    loss = partial(train_gpt.fp8_fused_loss, most=most) if most else train_gpt.fused_loss
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        return loss(x, head, targets, cap, weights, train_gpt.kernel_losses)


def reference(cap, most, x, head, targets, weights=None):
    if most:
        return lm_loss_in_fp8(x, head, targets, cap, most=most)
    return lm_loss(x, head, targets, cap, weights)


def golden_loss(x, head, targets, cap, weights=None):
    """FusedLoss in fp32; what is computed in fp64 stays with lm_loss."""
    if x.dtype != torch.float32 or not 0 < cap[0] <= 50:
        return lm_loss(x, head, targets, cap, weights)
    golden_loss.calls += 1
    return fused(cap, None, x, head, targets, weights)


def golden_tests():
    """Losses and gradients of tests/test_golden.py with the kernel: do they pass, and was it used?"""
    plain = golden_common.GoldenSet.model
    golden_loss.calls = 0

    def with_kernel(golden):
        model = plain(golden)
        model.use(type(model.kernels)(loss=golden_loss))
        return model

    golden_common.GoldenSet.model = with_kernel
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "losses or gradients", test_golden.__file__])
    print(f"golden tests: exit code {code}, {golden_loss.calls} losses by the kernel")
    return code == 0 and golden_loss.calls > 0


def main():
    assert train_gpt.triton, "there is no Triton here"
    good = True
    for cap in ((2.0, 0.0, 0.0), (15.0, 0.0, 0.0), (11.5, 5.0, 15.0)):
        for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 0.015)):
            for tokens, V in ((96, 64), (93, 50)):
                x, head, targets = head_and_tokens(dtype, tokens, V=V, size=2.0)
                exact = x.detach().float().requires_grad_()
                for weights in (None, torch.tensor([1.0, 0.5, 0.25])):
                    wanted = found(partial(reference, cap, None, weights=weights), exact, head,
                                   several(targets, weights))
                    got = found(partial(fused, cap, None, weights=weights), x, head,
                                several(targets, weights))
                    off = errors(got, wanted)
                    good &= max(off) < most
                    verdict = "equal" if max(off) < most else "DIFFERENT"
                    print(verdict, cap, dtype, tokens, V, weights, off)
    x, head, targets = head_and_tokens(torch.bfloat16)
    cap = (15.0, 0.0, 0.0)
    wanted = found(partial(reference, cap, None), x, head, targets)
    for most in (HEAD_MOST, HEAD_MOST_BY_MAXIMUM, None):
        off = errors(found(partial(fused, cap, most), x, head, targets), wanted)
        allowed = errors(found(partial(reference, cap, most), x, head, targets), wanted)
        fits = all(a <= 1.2 * b + 0.005 for a, b in zip(off, allowed))
        good &= fits and (max(off) > 0.02) == (most is not None)
        print("equal" if fits else "DIFFERENT", most, off, "by lm_loss", allowed)
    good &= golden_tests()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
