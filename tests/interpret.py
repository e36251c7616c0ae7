"""The Triton kernel against its reference, by Triton's interpreter: TRITON_INTERPRET=1 python interpret.py

Then the golden tests with it in place of lm_loss. Exit code 1 where loss or gradients differ.
test_static_gpu.py runs it, as a CUDA build of torch has Triton.
"""

import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import pytest  # noqa: E402
import torch  # noqa: E402

import test_golden  # noqa: E402
import train_gpt  # noqa: E402
from test_kernels import head_and_tokens  # noqa: E402
from train_gpt import FusedLoss, Kernels, fp8_head, fp8_linear, head_scales, linear, lm_loss  # noqa: E402


def found(loss, x, head, targets):
    """Value and gradients, of three times the loss."""
    value = loss(x, head, targets)
    return [value.detach(), *torch.autograd.grad(3 * value, (x, head))]


def errors(mine, exact):
    return [float((a - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True)]


def fused(cap, scales, x, head, targets):
    by_kernel = train_gpt.kernel_losses
    return FusedLoss.apply(x.flatten(0, -2), head, targets.flatten(), cap, scales, by_kernel)


def reference(cap, product, x, head, targets):
    return lm_loss(x, head, targets, cap, product)


def golden_loss(x, head, targets, cap, product):
    """FusedLoss in fp32; what is computed in fp64 stays with lm_loss."""
    if x.dtype != torch.float32 or not 0 < cap <= 50:
        return lm_loss(x, head, targets, cap, product)
    golden_loss.calls += 1
    return fused(cap, None, x, head, targets)


def golden_tests():
    """Losses and gradients of tests/test_golden.py with the kernel: do they pass, and was it used?"""
    plain, golden_loss.calls = test_golden.Golden.model, 0

    def with_kernel(golden):
        model = plain(golden)
        model.use(Kernels(loss=golden_loss))
        return model

    test_golden.Golden.model = with_kernel
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "losses or gradients", test_golden.__file__])
    print(f"golden tests: exit code {code}, {golden_loss.calls} losses by the kernel")
    return code == 0 and golden_loss.calls > 0


def main():
    assert train_gpt.triton, "there is no Triton here"
    good = True
    for cap in (2.0, 15.0, 30.0):
        for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 0.015)):
            for tokens, V in ((96, 64), (93, 50)):
                x, head, targets = head_and_tokens(dtype, tokens, V=V, size=2.0)
                exact = x.detach().float().requires_grad_()
                wanted = found(partial(reference, cap, linear), exact, head, targets)
                off = errors(found(partial(fused, cap, None), x, head, targets), wanted)
                good &= max(off) < most
                print("equal" if max(off) < most else "DIFFERENT", cap, dtype, tokens, V, off)
    x, head, targets = head_and_tokens(torch.bfloat16)
    wanted = found(partial(reference, 15.0, linear), x, head, targets)
    for product, scales in ((fp8_head, head_scales(32, 96)), (fp8_linear, (None,) * 3), (linear, None)):
        off = errors(found(partial(fused, 15.0, scales), x, head, targets), wanted)
        allowed = errors(found(partial(reference, 15.0, product), x, head, targets), wanted)
        fits = all(a <= 1.2 * b + 0.005 for a, b in zip(off, allowed))
        good &= fits and (max(off) > 0.02) == (product is not linear)
        print("equal" if fits else "DIFFERENT", product.__name__, off, "by lm_loss", allowed)
    good &= golden_tests()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
