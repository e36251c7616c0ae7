"""NVIDIA cards that people train on: what torch and Triton see of each, and what its datasheet says.

Peaks are dense, with fp32 accumulation; several of the documents print twice as much, with sparsity. Sources:
h100, h200: NVIDIA H100 and H200 Tensor Core GPU datasheets, SXM
a100: NVIDIA A100 Tensor Core GPU datasheet, SXM with 80 GB
b200, b300: NVIDIA HGX B200 and HGX B300 specifications, an eighth of eight GPUs (bf16 36 PFLOPS and fp8 72,
    with sparsity). In bf16 and fp8 B300 is as fast as B200: it has more fp4 and memory
5090: NVIDIA RTX Blackwell GPU Architecture, appendix A
pro6000: NVIDIA RTX PRO Blackwell GPU Architecture, Workstation Edition
4090, l4: NVIDIA Ada GPU Architecture 2.02, appendix A; NVIDIA L4 datasheet
3090: NVIDIA Ampere GA102 GPU Architecture 2.0, appendix A
t4: NVIDIA Turing GPU Architecture, appendix C
Threads and shared memory: CUDA C++ Programming Guide, technical specifications per compute capability. From
8.0 on a block can have 1 KB less than an SM. GiB: the total capacity that torch's out-of-memory errors on
these cards name. Nothing here imports torch.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Card(NamedTuple):
    """A card."""

    name: str  # as torch tells it
    capability: int
    processors: int  # SMs
    threads: int  # that an SM holds at once
    shared: int  # bytes of shared memory that a block can have
    GiB: float
    peak: float  # bf16 FLOP/s; 0: it has none
    fp8_peak: float  # 0: it has none
    bandwidth: float  # bytes/s


KB = 1024
CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", 90, 132, 2048, 227 * KB, 79.18, 989.4e12, 1978.9e12, 3.35e12),
    "a100": Card("NVIDIA A100-SXM4-80GB", 80, 108, 2048, 163 * KB, 79.25, 312e12, 0, 2.039e12),
    "4090": Card("NVIDIA GeForce RTX 4090", 89, 128, 1536, 99 * KB, 23.51, 165.2e12, 330.3e12, 1.008e12),
    "l4": Card("NVIDIA L4", 89, 58, 1536, 99 * KB, 22.04, 121e12, 242e12, 0.3e12),
    "t4": Card("Tesla T4", 75, 40, 1024, 64 * KB, 14.56, 0, 0, 0.32e12),
    "h200": Card("NVIDIA H200", 90, 132, 2048, 227 * KB, 139.80, 989.4e12, 1978.9e12, 4.8e12),
    "b200": Card("NVIDIA B200", 100, 148, 2048, 227 * KB, 178.35, 2250e12, 4500e12, 8e12),
    "b300": Card("NVIDIA B300 SXM6 AC", 103, 148, 2048, 227 * KB, 267.69, 2250e12, 4500e12, 8e12),
    "5090": Card("NVIDIA GeForce RTX 5090", 120, 170, 1536, 99 * KB, 31.37, 209.5e12, 419e12, 1.792e12),
    "pro6000": Card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 1536, 99 * KB, 94.97,
                    503.8e12, 1007.6e12, 1.792e12),
    "3090": Card("NVIDIA GeForce RTX 3090", 86, 82, 1536, 99 * KB, 23.68, 71e12, 0, 0.936e12),
}  # fmt: skip
# bf16 FLOP/s of cards that have no row above, by their datasheets; twice that in fp8. The first pattern that
# fits a name counts
OTHER_PEAKS = [("MIG", 0.0), ("H[12]00 NVL", 835.5e12), ("H100 PCIe", 756e12), ("L40S", 362e12)]
PATTERNS = {
    "h100": "H100", "h200": "H200", "b200": "B200", "b300": "B300", "a100": "A100", "l4": "L4", "t4": "T4",
    "5090": "RTX 5090", "4090": "RTX 4090", "3090": "RTX 3090",
    "pro6000": "RTX PRO 6000 Blackwell Workstation",
}  # fmt: skip


def fits(pattern: str, name: str) -> bool:
    return re.search(rf"\b{pattern}\b(?! Ti| D| Laptop)", name) is not None


def card_of(name: str) -> str:
    """The row of a card that torch calls so, "" for one that is not listed and for a part of one."""
    if any([fits(pattern, name) for pattern, _ in OTHER_PEAKS]):
        return ""
    return next((key for key, pattern in PATTERNS.items() if fits(pattern, name)), "")


def peak_flops(name: str, dtype: str = "bf16") -> float:
    """The dense peak of a card in bf16 or fp8, in FLOP/s; 0: not listed, or it lacks this dtype."""
    for pattern, peak in OTHER_PEAKS:
        if fits(pattern, name):
            return 2 * peak if dtype == "fp8" else peak
    key = card_of(name)
    if not key:
        return 0.0
    return CARDS[key].fp8_peak if dtype == "fp8" else CARDS[key].peak


# ---------------------------------------------------------------- MFU
class Work(NamedTuple):
    """What GPUs do in training."""

    flops_per_second: float  # model FLOPs, of all of them
    gpus: Sequence[str]  # as torch names them
    dtype: str  # of most products: bf16 or fp8


def mean_flops(stages: Sequence[tuple[int, int, float]], steps: int) -> float:
    """FLOPs per token, the mean over the first `steps` steps. stages: (first step as planned, though a clock
    may begin it earlier; tokens per step; FLOPs per token) of each."""
    ends = [first for first, _, _ in stages[1:]] + [steps]
    total = 0.0
    tokens = 0
    for (first, batch, flops), end in zip(stages, ends):
        here = max(0, min(end, steps) - first) * batch
        total += here * flops
        tokens += here
    return total / max(1, tokens)


def mfu(work: Work) -> tuple[float | None, str, list[float]]:
    """(model FLOPs utilization; the dtype whose dense peaks it counts against, bf16 if one of the GPUs lacks
    fp8; these peaks in FLOP/s, 0 where unknown). None: a peak is unknown."""
    dtype = work.dtype if all([peak_flops(name, work.dtype) for name in work.gpus]) else "bf16"
    peaks = [peak_flops(name, dtype) for name in work.gpus]
    used = work.flops_per_second / sum(peaks) if all(peaks) else None
    return used, dtype, peaks


def mfu_text(work: Work) -> str:
    """MFU, its dtype and the peak."""
    used, dtype, peaks = mfu(work)
    if used is None:
        return f"mfu:? of {work.gpus[peaks.index(0)]}, whose peak is unknown"
    return f"mfu:{used:.3f} in {dtype}, of {len(peaks)} x {sum(peaks) / len(peaks) / 1e12:.0f} TFLOP/s"
