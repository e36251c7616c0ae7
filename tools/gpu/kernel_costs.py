"""How a generated kernel walks through memory, and what a step's kernels would take on an H100.

static.py prints three kinds of numbers. Counted: launches, bytes and FLOPs of the compiled step. At the
ceilings: what a GPU would take that reaches the ceiling in every part. Estimated: the counted work at the
rates in RATES, which one H100 reached (docs/gpu_results/). This module has the rates, and what decides which
of them a kernel gets.

Inductor writes a pointwise kernel over one axis x unless it decides to tile. Where two tensors disagree on
which axis is contiguous, one of them is then read or written one element per 32-byte sector: a transposing
kernel. The transposed fp8 gradient of the speedrun's logits was one: 18.7 of 103.6 ms, at 265 GB/s.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # nothing here imports torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

SECTOR = 32  # bytes, the least that an H100 fetches from memory
LEAST_OVERFETCH = 4  # times the bytes that a tile needs: then the tensor is walked against its order
LEAST_SHARE = 1 / 8  # of a kernel's largest tensor: smaller tensors stay in the cache
LEAST_BYTES = 1 << 20  # of a tensor that counts as bulk; less fits the L2 cache of 50 MB many times over
PLACES = 3  # programs of the grid that are looked at
FP32 = 60e12  # FLOP/s of fp32 products, not measured
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "gpu_results"


# ---------- how a kernel walks
class Access(NamedTuple):
    """A load or store of a kernel: the name of its tensor, and the offsets that one program touches."""

    tensor: str
    offsets: np.ndarray


class Loaded:
    """A value that a kernel computes from what it has loaded. Nothing is known about it."""

    __array_ufunc__ = None  # numpy then leaves array + Loaded to the methods below

    def __call__(self, *args: Any, **kwargs: Any) -> "Loaded":
        return self

    def __getattr__(self, name: str) -> "Loaded":
        return self


def stays_unknown(self: Loaded, *args: Any) -> Loaded:
    return LOADED


for operation in (
    "add sub mul truediv floordiv mod pow and or xor lshift rshift "
    "lt le gt ge eq ne neg invert getitem"
).split():
    setattr(Loaded, f"__{operation}__", stays_unknown)
    setattr(Loaded, f"__r{operation}__", stays_unknown)
LOADED = Loaded()


class Index(np.ndarray):
    """Positions along the axes of a program's tile, and what is computed from them."""

    def to(self, dtype: object) -> "Index":
        return self

    def broadcast_to(self, *shape: object) -> "Index":
        return self


Number = int | Index | Loaded  # what a kernel computes with


class Pointer:
    """A tensor's address, and an offset in elements."""

    def __init__(self, tensor: str, offset: Number = 0) -> None:
        self.tensor = tensor
        self.offset = offset

    def __add__(self, offset: Number) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)


def computed(function: Callable[..., np.ndarray], *values: Number) -> Index | Loaded:
    """function(*values), unless some value comes from memory."""
    for value in values:
        if value is LOADED:
            return LOADED
    return np.asarray(function(*values)).view(Index)


class Language:
    """What a kernel finds as `tl`, `triton_helpers`, `libdevice` and `tl_math`: numpy computes the indices,
    loads and stores are written down, all else is LOADED."""

    constexpr = int

    def __init__(self, program: Sequence[int], accesses: list[Access]) -> None:
        self.program = program
        self.accesses = accesses

    def program_id(self, axis: int) -> Index:
        return np.array([self.program[axis]]).view(Index)

    def num_programs(self, axis: int) -> int:
        return 1  # only asked for where a grid has a third axis, on which program stands at 0

    def arange(self, first: int, end: int) -> Index:
        return np.arange(first, end, dtype=np.int64).view(Index)

    def range(self, first: int, end: int, step: int, **options: object) -> list[int]:
        """A reduction's loop: one turn in the middle stands for all."""
        turns = max(1, (end - first) // step)
        return [first + turns // 2 * step]

    def full(self, shape: Sequence[int] | Loaded, value: Number, dtype: object) -> Index | Loaded:
        if value is LOADED:
            return LOADED
        axes = 1 if shape is LOADED else len(shape)
        return np.full([1] * axes, value).view(Index)

    def broadcast_to(self, value: Number, *shape: object) -> Number:
        return value

    def where(self, condition: Number, first: Number, second: Number) -> Index | Loaded:
        return computed(np.where, condition, first, second)

    def minimum(self, first: Number, second: Number) -> Index | Loaded:
        return computed(np.minimum, first, second)

    def maximum(self, first: Number, second: Number) -> Index | Loaded:
        return computed(np.maximum, first, second)

    def load(self, pointer: Pointer, mask: Number | None = None, **options: object) -> Loaded:
        self.note(pointer, mask)
        return LOADED

    def store(self, pointer: Pointer, value: Number, mask: Number | None = None, **options: object) -> None:
        self.note(pointer, mask)

    def note(self, pointer: Pointer, mask: Number | None) -> None:
        """Gathers, whose offsets come from memory, are left out: what they touch depends on the data."""
        if pointer.offset is LOADED:
            return
        offsets = np.asarray(pointer.offset)
        if isinstance(mask, np.ndarray):
            offsets, mask = np.broadcast_arrays(offsets, mask)
            offsets = offsets[mask]
        self.accesses.append(Access(pointer.tensor, offsets.ravel()))

    def __getattr__(self, name: str) -> Loaded:
        return LOADED


class Kernel:
    """A kernel as Inductor wrote it: a function of pointers, sizes and block sizes."""

    def __init__(self, source: str, name: str) -> None:
        tree = ast.parse(source)
        (self.function,) = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name]
        self.function.decorator_list = []
        self.module = compile(ast.Module([self.function], []), name, "exec")
        self.names = [x.arg for x in self.function.args.args]
        self.sizes: dict[str, int] = {}  # those that are written into the kernel
        for line in self.function.body:
            if isinstance(line, (ast.Assign, ast.AnnAssign)) and isinstance(line.value, ast.Constant):
                target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                self.sizes[target.id] = line.value.value

    def accesses(
        self, tensors: Iterable[str], sizes: dict[str, int], blocks: dict[str, int], program: Sequence[int]
    ) -> list[Access]:
        """[Access] to these tensors of a program of the grid."""
        found: list[Access] = []
        language = Language(program, found)
        space: dict[str, Any] = dict.fromkeys(("tl", "triton_helpers", "libdevice", "tl_math"), language)
        exec(self.module, space)
        arguments = {name: Pointer(name) for name in tensors} | sizes | blocks
        space[self.function.name](*[arguments.get(name, LOADED) for name in self.names])
        return found


def overfetch(offsets: np.ndarray, size: int) -> tuple[float, int]:
    """Bytes of the sectors that hold these elements of `size` bytes, over the bytes of the elements; and the
    number of elements."""
    touched = np.unique(offsets)
    sectors = np.unique(touched * size // SECTOR)
    return len(sectors) * SECTOR / (len(touched) * size), len(touched)


def walked_against(
    kernel: Kernel, sizes: dict[str, int], blocks: dict[str, int], item_sizes: dict[str, int]
) -> tuple[dict[str, int], list[str]]:
    """{tensor: its elements in a tile}, and the tensors whose sectors have LEAST_OVERFETCH times the bytes
    that the tile needs. item_sizes: {tensor: bytes of an element}."""
    grids = []
    for axis in "xyz":
        numel = sizes.get(f"{axis}numel", 1)
        block = blocks.get(f"{axis.upper()}BLOCK", 1)
        grids.append(max(1, -(-numel // block)))
    elements: dict[str, int] = {}
    ratios: dict[str, list[float]] = {}
    for place in range(PLACES):
        program = [count * place // PLACES for count in grids]
        for tensor, offsets in kernel.accesses(item_sizes, sizes, blocks, program):
            if len(offsets):
                ratio, count = overfetch(offsets, item_sizes[tensor])
                elements[tensor] = max(count, elements.get(tensor, 0))
                ratios.setdefault(tensor, []).append(ratio)
    against = [tensor for tensor, found in ratios.items() if np.median(found) >= LEAST_OVERFETCH]
    return elements, against


def strided_bytes(
    kernel: Kernel,
    sizes: dict[str, int],
    configs: list[dict[str, int]],
    tensors: dict[str, tuple[int, int]],
) -> int:
    """Bytes of the bulk tensors that a kernel walks against their order, by the best of its configurations.
    tensors: {name: (bytes of an element, bytes)}. configs: [{block: size}]."""
    item_sizes = {name: item for name, (item, _) in tensors.items()}
    work = 1
    for name, size in sizes.items():
        if re.fullmatch(r"([xyz]|r\d_)numel", name):
            work *= size
    least = None
    for blocks in configs:
        elements, against = walked_against(kernel, sizes, blocks, item_sizes)
        largest = max(elements.values(), default=0)
        bulk = {}
        for name, count in elements.items():
            item, whole = tensors[name]
            bulk[name] = min(whole, item * work * count // max(largest, 1))
        enough = max(LEAST_BYTES, LEAST_SHARE * max(bulk.values(), default=0))
        total = sum(bulk[name] for name in against if bulk[name] >= enough)
        least = total if least is None else min(least, total)
    return least or 0


@cache
def read_kernel(path: str, name: str) -> Kernel:
    return Kernel(Path(path).read_text(), name)


def strided_bytes_of(tuner: "CachingAutotuner", args: Sequence[Any]) -> int | None:
    """The same of a kernel that Inductor launches with these arguments; None where its source has something
    that Language lacks."""
    try:
        kernel = read_kernel(tuner.filename, tuner.fn.__name__)
        sizes = dict(kernel.sizes)
        tensors = {}
        for name, value in zip(kernel.names, args):
            if hasattr(value, "element_size"):
                tensors[name] = (value.element_size(), value.nbytes)
            elif isinstance(value, int):
                sizes.setdefault(name, value)
        configs = [result.config.kwargs for result in tuner.compile_results]
        return strided_bytes(kernel, sizes, configs, tensors)
    except (OSError, ValueError, TypeError, KeyError, NameError, AttributeError, IndexError):
        return None


# ---------- what a step's kernels take on an H100
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
    "transposing": Rate(265e9, "speedrun_timed", r"_scaled_mm__to_copy_clamp_clone_div_new_full_t_view"),
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


def memory_seconds(name: str, size: int, strided: int = 0, rows: int = 0) -> float:
    """The time to expect of a launch that moves so many bytes. The kernel behind the rate of transposing ones
    reads as much as it writes, so what is walked against the order (strided) counts twice."""
    kind = family(name)
    slow = min(size, 2 * strided)
    rate = RATES.get(kind, RATES["norms"]).value
    rate = TIMED_ALONE.get(kind, rate)
    seconds = (size - slow) / rate + slow / RATES["transposing"].value
    if kind == "loss":
        seconds += rows * LOSS_ROW
    return max(LEAST_KERNEL, seconds)


def measured_kernels(log: str) -> tuple[dict[str, dict[str, Any]], float]:
    """{name: its row} of the 15 longest kernels of a log, and the ms of all."""
    verdicts = json.loads((RESULTS / f"2026-11-26_{log}.json").read_text())["verdicts"]
    (figures,) = [row["figures"] for row in verdicts if "kernels" in row.get("figures", {})]
    return {row["name"]: row for row in figures["kernels"]}, figures["kernel_ms"]


def measured_rate(rate: Rate) -> float:
    """The same rate by its logs."""
    work = 0.0
    seconds = 0.0
    for log in rate.log.split():
        for name, row in measured_kernels(log)[0].items():
            if re.search(rate.kernels, name):
                seconds += row["ms"] / 1e3
                work += row.get("GBps", 0) * 1e9 * row["ms"] / 1e3
    return (rate.work or work) / seconds


class Launch(NamedTuple):
    """A kernel's share of an estimate."""

    kernel: str
    family: str
    seconds: float
    size: int = 0
    strided: int = 0


def product_seconds(m: int, n: int, k: int, batch: int, kind: int, out_size: int) -> float:
    """Of a product in cudaDataType `kind`: 28 and 29 are fp8, 0 is fp32, which no log has."""
    size = {28: 1, 29: 1, 0: 4}.get(kind, 2)
    rate = {1: RATES["products fp8"].value, 2: RATES["products bf16"].value, 4: FP32}[size]
    data = batch * (size * (m * k + k * n) + out_size * m * n)
    return max(LEAST_KERNEL, 2 * m * n * k * batch / rate, data / RATES["norms"].value)


def launches(lines: list[list[str]]) -> Iterator[tuple[str, Launch]]:
    """(phase, Launch) of each line of the stand-in's record that has a time of its own."""
    phase = "model"
    size = 0  # of the kernel whose launch comes next
    for place, (kind, *words) in enumerate(lines):
        if kind == "phase":
            phase = words[0]
        elif kind == "gemm":
            m, n, k, batch, a, out = map(int, words[2:8])
            name = {28: "fp8", 29: "fp8", 0: "fp32"}.get(a, "bf16")
            seconds = product_seconds(m, n, k, batch, a, 4 if out == 0 else 2)
            yield phase, Launch("product", f"products {name}", seconds)
        elif kind == "attention":
            B, H, T, D, K, causal = map(int, words[2:8])
            work = 4 * B * H * T * K * D / (2 if causal else 1)
            if words[1] == "forward":
                yield phase, Launch("attention", "dense attention", work / RATES["attention forward"].value)
            else:
                seconds = 2.5 * work / RATES["attention backward"].value
                yield phase, Launch("attention", "dense attention", seconds)
        elif kind == "bytes":
            size = int(words[1])
        elif kind == "triton" and "_tem_" not in words[0]:
            after = lines[place + 1] if place + 1 < len(lines) else [""]
            strided = int(after[2]) if after[0] == "strided" else 0
            rows = int(words[1].split(",")[0])
            kept = max(strided, 0)
            group = "transposing" if kept else family(words[0])
            seconds = memory_seconds(words[0], size, kept, rows)
            yield phase, Launch(words[0], group, seconds, size, strided)
            size = 0
        elif kind in ("copy", "memset"):
            yield phase, Launch(kind, "torch's kernels", LEAST_KERNEL)


def estimate(lines: list[list[str]], flex_flop: float, eager: float, steps: int) -> dict[str, Any]:
    """Estimated ms of a step, by family and by kernel, and the kernels that walk against the order in memory.
    Of all steps: flex_flop, eager (bytes of torch's own kernels)."""
    families = {"flex attention": flex_flop / RATES["flex attention"].value}
    phases = {"optimizer": 0.0, "model": 0.0}
    kernels: dict[str, list[float]] = {}
    for phase, launch in launches(lines):
        families[launch.family] = families.get(launch.family, 0.0) + launch.seconds
        phases[phase] += launch.seconds
        row = kernels.setdefault(launch.kernel, [0.0, 0, 0, 0])
        row[0] += launch.seconds
        row[1] += launch.size
        row[2] += launch.strided
        row[3] += 1
    own = sum(1 for line in lines if line[0] == "torch")
    extra = max(own * LEAST_KERNEL, eager / RATES["norms"].value)
    families["torch's kernels"] = families.get("torch's kernels", 0.0) + extra
    transposing = []
    unread = set()
    for name, (seconds, size, strided, count) in sorted(kernels.items(), key=lambda item: -item[1][0]):
        if strided > 0:
            transposing.append(
                dict(
                    name=name,
                    launches=count / steps,
                    ms=round(1e3 * seconds / steps, 3),
                    GB=round(size / steps / 1e9, 3),
                    strided_GB=round(strided / steps / 1e9, 3),
                )
            )
        if strided < 0:
            unread.add(name)
    return dict(
        estimate_ms={name: round(1e3 * value / steps, 2) for name, value in families.items() if value},
        estimate_sum_ms=round(1e3 * sum(families.values()) / steps, 1),
        estimate_optimizer_ms=round(1e3 * phases["optimizer"] / steps, 2),
        estimate_kernels={name: round(1e3 * row[0] / steps, 3) for name, row in kernels.items()},
        transposing=transposing,
        unread=sorted(unread),
    )
