"""What a CUDA card has been seen to run: the rows of tools/gpu/seen_on_gpu.tsv.

    from tools.gpu.seen_on_gpu import load, seen
    seen("aten.mm", ("bfloat16", "bfloat16"))

The table is filled by `python tools/gpu/results.py` from the reports in docs/gpu_results/, and by nothing
else: an operator by what ran outside of Inductor's generated kernels, with the dtypes and the layout
of its tensors; a kernel by the name that torch's profiler gave, whose dtypes are `-` unless the name has
them. Nothing here imports torch.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).resolve().parent / "seen_on_gpu.tsv"
HEAD = ("operator", "dtypes", "layout", "card", "torch", "report")
UNKNOWN = "-"
# Operators that launch no kernel
VIEWS = set(
    """view _unsafe_view view_as as_strided transpose t permute expand expand_as slice select unsqueeze
    squeeze detach detach_ alias reshape _reshape_alias unflatten flatten split split_with_sizes chunk unbind
    narrow diagonal unfold empty empty_like empty_strided new_empty new_empty_strided lift_fresh resolve_conj
    resolve_neg item is_nonzero _local_scalar_dense record_stream set_ resize_""".split()
)
KERNEL_DTYPES = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "bool": "bool",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
}


class Row(NamedTuple):
    """An operator or a family of kernels as it ran. dtypes and layout: of its tensors, joined by commas."""

    operator: str
    dtypes: str
    layout: str
    card: str
    torch: str
    report: str  # the file that showed it


# ---------- the table
def load(path: Path = TABLE) -> list[Row]:
    """Its rows."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [Row(*line.split("\t")) for line in lines if line]


@cache
def known(path: Path) -> frozenset[tuple[str, str]]:
    return frozenset([(row.operator, row.dtypes) for row in load(path)])


def seen(operator: str, dtypes: tuple[str, ...], path: Path = TABLE) -> bool:
    """Has a card run this operator on tensors of these dtypes, whatever their layout? The operator as torch
    names it: aten.mm, aten.mm.out, aten::mm and mm are the same; so are torch.bfloat16 and bfloat16."""
    names = [dtype.removeprefix("torch.") for dtype in dtypes]
    return (canonical(operator), ",".join(names) or UNKNOWN) in known(path)


def write(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Each kind once, by the report that showed it first."""
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        kept.setdefault(row[:5], row)
    lines = ["\t".join(HEAD), *["\t".join(row) for row in sorted(kept.values())]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------- operators
def canonical(operator: str) -> str:
    """aten.mm of aten.mm.out, aten.mm.default, aten::mm or mm. A kernel's name stays."""
    name = operator.replace("::", ".") if operator.startswith("aten::") else operator
    parts = name.split(".")
    if parts[0] == "aten" and len(parts) > 1:
        return f"aten.{parts[1]}"
    if re.fullmatch(r"_{0,2}[a-z][a-z0-9_]*", name) and "_kernel" not in name:
        return f"aten.{name}"
    return operator


def launches(operator: str) -> bool:
    """Does this operator of torch start a kernel, as far as its name tells?"""
    return canonical(operator).removeprefix("aten.") not in VIEWS


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> str:
    """contiguous; transposed: contiguous if its last two dimensions change places; else strided."""

    def dense(shape: list[int], strides: list[int]) -> bool:
        expected = 1
        for size, stride in zip(reversed(shape), reversed(strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    sizes = [int(size) for size in shape]
    steps = [int(stride) for stride in strides]
    if dense(sizes, steps):
        return "contiguous"
    if len(sizes) > 1:
        sizes[-2:] = [sizes[-1], sizes[-2]]
        steps[-2:] = [steps[-1], steps[-2]]
        if dense(sizes, steps):
            return "transposed"
    return "strided"


def is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and callable(getattr(value, "stride", None))


def describe(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(dtypes, layouts) of the tensors that an operator is given, `out` aside. Those of a list are told as
    one: `float32[]`."""
    dtypes = []
    layouts = []
    for value in [*args, *[value for name, value in kwargs.items() if name != "out"]]:
        if is_tensor(value):
            dtypes.append(str(value.dtype).removeprefix("torch."))
            layouts.append(layout_of(value.shape, value.stride()))
        elif isinstance(value, list | tuple):
            tensors = [one for one in value if is_tensor(one)]
            if tensors:
                names = sorted({str(one.dtype).removeprefix("torch.") for one in tensors})
                forms = sorted({layout_of(one.shape, one.stride()) for one in tensors})
                dtypes.append("+".join(names) + "[]")
                layouts.append("+".join(forms) + "[]")
    return tuple(dtypes), tuple(layouts)


# ---------- kernels, by the profiler's names
def family(kernel: str) -> tuple[str, str, str] | None:
    """(family, dtypes, layout) of a kernel, as its name tells them; None: made by Inductor for one graph."""
    if kernel.startswith("triton_tem"):
        backward = "_backward" if "flex_attention_backward" in kernel else ""
        return (
            (f"triton_tem flex_attention{backward}", UNKNOWN, UNKNOWN) if "flex_attention" in kernel else None
        )
    if kernel.startswith("triton_"):
        return None
    product = re.match(r"(nvjet_sm\d+_[a-z]+)_.*_([NT]{3})$", kernel)
    if product:
        return product[1], UNKNOWN, product[2]
    name = re.split(r"[<(]", kernel.removeprefix("void "))[0].strip()
    name = re.sub(r"_knob_.*", "", name)
    functor = re.search(r"(\w+_functor)<([\w:]+)", kernel)
    if functor:
        return f"{name} {functor[1]}", KERNEL_DTYPES.get(functor[2], UNKNOWN), UNKNOWN
    return name, UNKNOWN, UNKNOWN


def rows_of(report: dict[str, Any]) -> list[Row]:
    """What a report of a card shows to have run there."""
    name = report["name"]
    machine = report["machine"]
    card = machine["gpu"]
    version = machine["torch"]
    found = []
    for operators in report.get("operators", {}).values():
        for row in operators:
            dtypes = ",".join(row["dtypes"]) or UNKNOWN
            layout = ",".join(row["layouts"]) or UNKNOWN
            found.append(Row(canonical(row["operator"]), dtypes, layout, card, version, name))
    for verdict in report["verdicts"]:
        kernels = [kernel["name"] for kernel in verdict["figures"].get("kernels", [])]
        kernels += re.findall(
            r", by (.+?): off from fp32", verdict["text"]
        )  # of attention, cut at 60 letters
        for kernel in kernels:
            kind = family(kernel)
            if kind and kernel != "plain products":
                found.append(Row(*kind, card, version, name))
    return found
