"""What a step's kernels would take on an H100, for `./run.sh static`.

static.py prints three kinds of numbers. Counted: launches, bytes and FLOPs of the compiled step. At the
ceilings: what a GPU would take that reaches the ceiling in every part. Estimated: the counted work at the
rates in RATES, which one H100 reached (docs/gpu_results/). A kernel that walks through a tensor against its
order in memory takes several times as long as the estimate says.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

FP32 = 60e12  # FLOP/s of fp32 products, not measured


class Rate(NamedTuple):
    """What one H100 reached: the rate, and the kernels of a log that it comes from."""

    value: float  # FLOP/s, bytes/s or, of a row of the loss, seconds
    log: str  # docs/gpu_results/2026-11-26_<log>.json
    kernels: str  # pattern of their names
    work: float = 0.0  # FLOP or bytes of those kernels, as counted at that commit; 0: by GBps of the log


# One H100 80GB HBM3, torch 2.11.0+cu130, commit ab8f194, one rank of eight, made-up tokens. `work` is what
# `static golf TRAIN_BATCH_TOKENS=49152 --ranks 1` and `static speedrun TRAIN_BATCH_TOKENS=16384 --ranks 1`
# count for that commit by --trainer. No other generated kernel, no kernel of torch's own and no
# transpose_kernel is among the 15 longest of a log: these get the rate of the norms.
RATES = {
    # Among the 15 longest are all of golf's 111 products without the optimizer's, and 116 of the speedrun's
    # 126 (with five small launches of the same kernel): not the ten gradients of attention's output weights,
    # of 0.058 TFLOP each. 21.69 TFLOP in 29.09 ms and 5.04 in 7.58: 746 and 665 TFLOP/s
    "products bf16": Rate(729e12, "speedrun_timed golf_timed", r"nvjet_sm90_tst_", 26.73e12),
    "products fp8": Rate(1396e12, "speedrun_timed", r"nvjet_sm90_q", 11.393e12),
    "attention forward": Rate(430e12, "golf_timed", r"cudnn.*fprop", 1.855e12),
    "attention backward": Rate(358e12, "golf_timed", r"cudnn.*bprop|cudnn::fusion", 4.639e12),
    # The third stage, window 1,408. Pairs in blocks of 128 within the window and documents of 700 tokens,
    # about what gpu-report makes up: window_pairs()
    "flex attention": Rate(214.5e12, "speedrun_timed", r"triton_tem_.*flex_attention", 2.804e12),
    "relu^2": Rate(3.0e12, "speedrun_timed golf_timed", r"poi_fused__unsafe_view_leaky_relu_pow_"),
    "relu^2 backward": Rate(2.03e12, "speedrun_timed golf_timed", r"leaky_relu_backward"),
    "norms": Rate(2.63e12, "speedrun_timed golf_timed", r"triton_(per|red)_.*rms_norm"),
}
# By hand from docs/gpu_results/2026-11-27_loss_and_transpose.txt. The loss: bytes beside LOSS_ROW, each
# counted once, though logits are read twice: 4.19 ms for 49,152 rows of 50,304 logits. Today's kernel has 4 %
# more instructions per logit than the one that was timed.
TIMED_ALONE = {"loss": 2.07e12, "tiled transpose": 2.76e12}
# s a row, by golf and golf_plus in logs of runs side by side (2026-11-26_golf.json and
# 2026-11-26_golf_plus.json): no log of a run alone has a loss of few logits among its 15 longest
LOSS_ROW = 12.3e-9
DOCUMENT = 700  # tokens, of gpu-report's made-up text
LEAST_KERNEL = 2.5e-6  # s that a kernel takes at least. A guess: no log times small kernels


def family(name: str) -> str:
    """The family of a kernel that moves bytes, by the name that Inductor gave it."""
    if name.startswith("loss_kernel"):
        return "loss"
    if name.startswith("transpose_kernel"):
        return "tiled transpose"
    if "relu_backward" in name:
        return "relu^2 backward"
    if "relu" in name:
        return "relu^2"
    if "rms_norm" in name:
        return "norms"
    return "other generated"


def memory_seconds(name: str, size: int, rows: int = 0) -> float:
    """The time to expect of a launch that moves so many bytes."""
    kind = family(name)
    rate = RATES.get(kind, RATES["norms"]).value
    seconds = size / TIMED_ALONE.get(kind, rate)
    if kind == "loss":
        seconds += rows * LOSS_ROW
    return max(LEAST_KERNEL, seconds)


# ---------- the stand-in's record
SIZES = {0: 4, 2: 2, 14: 2, 28: 1, 29: 1}  # bytes of a number, by cudaDataType
NAMES = {0: "fp32", 2: "fp16", 14: "bf16", 28: "fp8", 29: "fp8"}


class Launch(NamedTuple):
    """What the record says of a launch."""

    phase: str  # optimizer or model
    kernel: str
    family: str
    flop: float = 0.0
    size: int = 0  # bytes of its tensors, each once
    programs: int = 0  # of the loss: one for each row
    registers: int = 0
    stack: int = 0  # bytes

    def seconds(self) -> float:
        """The time to expect on an H100. What flex attention computes is not in the record."""
        if self.family.startswith("attention"):
            return self.flop / RATES[self.family].value
        if self.family.startswith("products"):
            rate = RATES[self.family].value if self.family in RATES else FP32
            return max(LEAST_KERNEL, self.flop / rate, self.size / RATES["norms"].value)
        if self.kernel.startswith("triton_tem_"):
            return 0.0
        if self.family == TORCH:  # whose bytes are not known
            return LEAST_KERNEL
        return memory_seconds(self.kernel, self.size, self.programs)


TORCH = "torch's kernels"


def launches(lines: list[list[str]]) -> Iterator[Launch]:
    """Of the record's lines those that are launches."""
    phase = "model"
    size = 0  # of the kernel whose launch comes next
    for kind, *words in lines:
        if kind == "phase":
            phase = words[0]
        elif kind == "bytes":
            size = int(words[1])
        elif kind == "gemm":
            m, n, k, batch, a, out = map(int, words[2:8])
            moved = batch * (SIZES[a] * (m * k + k * n) + SIZES[out] * m * n)
            yield Launch(phase, "product", f"products {NAMES[a]}", 2 * m * n * k * batch, moved)
        elif kind == "attention":
            B, H, T, D, K, causal = map(int, words[2:8])
            work = 4 * B * H * T * K * D / (2 if causal else 1)
            yield Launch(phase, kind, f"attention {words[1]}", work * (1 if words[1] == "forward" else 2.5))
        elif kind == "triton":
            name = words[0]
            if "_tem_" in name:  # flex attention, of which the mask decides how much is read
                size = 0
            programs = int(words[1].split(",")[0])
            yield Launch(phase, name, family(name), 0, size, programs, int(words[4]), int(words[5]))
            size = 0
        elif kind in ("copy", "memset", "torch"):
            yield Launch(phase, kind, TORCH, size=int(words[0]) if kind == "memset" else 0)


def estimate(lines: list[list[str]], flex_flop: float, steps: int) -> dict[str, Any]:
    """Estimated ms of a step, by family. flex_flop: of all steps."""
    families = {"flex attention": flex_flop / RATES["flex attention"].value}
    phases = {"optimizer": 0.0, "model": 0.0}
    for launch in launches(lines):
        families[launch.family] = families.get(launch.family, 0.0) + launch.seconds()
        phases[launch.phase] += launch.seconds()
    return dict(
        estimate_ms={name: round(1e3 * value / steps, 2) for name, value in families.items() if value},
        estimate_sum_ms=round(1e3 * sum(families.values()) / steps, 1),
        estimate_optimizer_ms=round(1e3 * phases["optimizer"] / steps, 2),
    )
