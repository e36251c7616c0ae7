"""What a step's kernels would take on an H100, for `./run.sh static`: what it counts of the compiled step, at
the rates that one H100 reached (docs/gpu_results/). A kernel that makes strided reads takes several times as
long as the estimate says.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

# FLOP/s or bytes/s. One H100 80GB HBM3, torch 2.11.0+cu130, commit ab8f194, one rank of eight, random tokens:
# ms and GB/s of the 15 longest kernels in docs/gpu_results/2026-11-26_golf_timed.json and
# 2026-11-26_speedrun_timed.json. FLOPs are those that `static golf TRAIN_BATCH_TOKENS=49152 --ranks 1` and
# `static speedrun TRAIN_BATCH_TOKENS=16384 --ranks 1` count for that commit by --trainer. No other generated
# kernel, no kernel of torch's own and no transpose_kernel is among them: these get the rate of the norms.
RATES = {
    # nvjet_sm90_tst_* of both. Among the 15 longest are all of golf's 111 products without the optimizer's,
    # and 116 of the speedrun's 126 (with five small launches of the same kernel): not the ten gradients of
    # attention's output weights, of 0.058 TFLOP each. 21.69 TFLOP in 29.09 ms and 5.04 in 7.58: 746 and 665
    # TFLOP/s
    "products bf16": 729e12,
    "products fp8": 1396e12,  # speedrun's nvjet_sm90_q*, 11.393 TFLOP
    "products fp32": 60e12,  # not measured
    "attention forward": 430e12,  # golf's cudnn*fprop, 1.855 TFLOP
    "attention backward": 358e12,  # golf's cudnn*bprop and cudnn::fusion, 4.639 TFLOP
    # speedrun's triton_tem_*flex_attention in the third stage, window 1,408: 2.804 TFLOP of pairs in blocks
    # of 128 within the window and documents of 700 tokens, about what gpu-report makes up: window_pairs()
    "flex attention": 214.5e12,
    "relu^2": 3.0e12,  # poi_fused__unsafe_view_leaky_relu_pow_* of both
    "relu^2 backward": 2.03e12,  # leaky_relu_backward of both
    "norms": 2.63e12,  # triton_per_* and triton_red_* with rms_norm of both
    # By hand from docs/gpu_results/2026-11-27_loss_and_transpose.txt. The loss: bytes beside LOSS_ROW, each
    # counted once, though logits are read twice: 4.19 ms for 49,152 rows of 50,304 logits. Today's kernel has
    # 4 % more instructions per logit than the one that was timed.
    "loss": 2.07e12,
    "tiled transpose": 2.76e12,
}
# s a row, by golf and golf_plus in logs of runs side by side (2026-11-26_golf.json and
# 2026-11-26_golf_plus.json): no log of a run alone has a loss of few logits among its 15 longest
LOSS_ROW = 12.3e-9
DOCUMENT = 700  # tokens, of gpu-report's made-up text
LEAST_KERNEL = 2.5e-6  # s that a kernel takes at least. A guess: no log times small kernels
# What the name that Inductor gave a kernel has in it -> its family; the first that fits
NAMED = {
    "loss_kernel": "loss",
    "transpose_kernel": "tiled transpose",
    "relu_backward": "relu^2 backward",
    "relu": "relu^2",
    "rms_norm": "norms",
}
OTHER = "other generated"
TORCH = "torch's kernels"


# ---------- the stand-in's record
SIZES = {0: 4, 2: 2, 14: 2, 28: 1, 29: 1}  # bytes of a number, by cudaDataType
NAMES = {0: "fp32", 2: "fp16", 14: "bf16", 28: "fp8", 29: "fp8"}


class Launch(NamedTuple):
    """What the record says of a launch."""

    kernel: str
    family: str
    flop: float = 0.0
    size: int = 0  # bytes of its tensors, each once
    programs: int = 0  # of the loss: one for each row
    registers: int = 0
    stack: int = 0  # bytes

    def seconds(self) -> float:
        """The time to expect on an H100. What flex attention computes is not in the record."""
        if self.kernel.startswith("triton_tem_"):
            return 0.0
        seconds = self.size / RATES["norms"]
        if self.flop:
            seconds = max(seconds, self.flop / RATES.get(self.family, RATES["products fp32"]))
        elif self.family in RATES:
            seconds = self.size / RATES[self.family]
        if self.family == "loss":
            seconds += self.programs * LOSS_ROW
        return max(LEAST_KERNEL, seconds)


def launches(lines: list[list[str]]) -> Iterator[Launch]:
    """Of the record's lines those that are launches."""
    size = 0  # of the kernel whose launch comes next
    for kind, *words in lines:
        if kind == "bytes":
            size = int(words[1])
        elif kind == "gemm":
            m, n, k, batch, a, out = map(int, words[2:8])
            moved = batch * (SIZES[a] * (m * k + k * n) + SIZES[out] * m * n)
            yield Launch("product", f"products {NAMES[a]}", 2 * m * n * k * batch, moved)
        elif kind == "attention":
            B, H, T, D, K, causal = map(int, words[2:8])
            work = 4 * B * H * T * K * D / (2 if causal else 1)
            yield Launch(kind, f"attention {words[1]}", work * (1 if words[1] == "forward" else 2.5))
        elif kind == "triton":
            name = words[0]
            if "_tem_" in name:  # flex attention, of which the mask decides how much is read
                size = 0
            family = next((NAMED[part] for part in NAMED if part in name), OTHER)
            programs = int(words[1].split(",")[0])
            yield Launch(name, family, 0, size, programs, int(words[4]), int(words[5]))
            size = 0
        elif kind in ("copy", "memset", "torch"):  # whose bytes are not known
            yield Launch(kind, TORCH)


def estimate(lines: list[list[str]], flex_flop: float, steps: int) -> dict[str, Any]:
    """Estimated ms of a step, by family. flex_flop: of all steps."""
    families = {"flex attention": flex_flop / RATES["flex attention"]}
    for launch in launches(lines):
        families[launch.family] = families.get(launch.family, 0.0) + launch.seconds()
    return dict(
        estimate_ms={name: round(1e3 * value / steps, 2) for name, value in families.items() if value},
        estimate_sum_ms=round(1e3 * sum(families.values()) / steps, 1),
    )
