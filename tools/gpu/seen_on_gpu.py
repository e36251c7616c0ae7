"""What a CUDA card has been seen to run: the rows of tools/gpu/seen_on_gpu.tsv.

    from tools.gpu.seen_on_gpu import load, seen
    seen("aten.mm", ("bfloat16",))

The table is filled by `python -m tools.gpu.results` from the reports in docs/gpu_results/, and by nothing
else: an operator by what ran outside of Inductor's generated kernels, with the dtypes of its tensors, each
once; a kernel by the name that torch's profiler gave, whose dtypes are `-`. Nothing here imports torch.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).resolve().parent / "seen_on_gpu.tsv"
HEAD = ("operator", "dtypes", "card", "torch", "report")
UNKNOWN = "-"
# Operators that launch no kernel
VIEWS = set(
    """view _unsafe_view view_as as_strided transpose t permute expand expand_as slice select unsqueeze
    squeeze detach detach_ alias reshape _reshape_alias unflatten flatten split split_with_sizes chunk unbind
    narrow diagonal unfold empty empty_like empty_strided new_empty new_empty_strided lift_fresh resolve_conj
    resolve_neg item is_nonzero _local_scalar_dense record_stream set_ resize_""".split()
)


class Row(NamedTuple):
    """An operator or a family of kernels as it ran. dtypes: of its tensors, joined by commas."""

    operator: str
    dtypes: str
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
    """Has a card run this operator on tensors of these dtypes, as dtypes_of() tells them? The operator as
    torch names it: aten.mm, aten.mm.out and aten::mm are the same."""
    return (canonical(operator), ",".join(dtypes) or UNKNOWN) in known(path)


def write(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Each kind once, by the report that showed it first."""
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        kept.setdefault(row[:4], row)
    lines = ["\t".join(HEAD), *["\t".join(row) for row in sorted(kept.values())]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------- operators
def canonical(operator: str) -> str:
    """aten.mm of aten.mm.out, aten.mm.default or aten::mm."""
    return ".".join(operator.replace("::", ".").split(".")[:2])


def launches(operator: str) -> bool:
    """Does this operator of torch start a kernel, as far as its name tells?"""
    return canonical(operator).removeprefix("aten.") not in VIEWS


def dtypes_of(values: Iterable[Any]) -> tuple[str, ...]:
    """The dtypes of the tensors among these values, each once."""
    names = [str(value.dtype).removeprefix("torch.") for value in values if hasattr(value, "is_cuda")]
    return tuple(dict.fromkeys(names))


# ---------- kernels, by the profiler's names
def family(kernel: str) -> str:
    """The family of a kernel, as its name tells it; "": made by Inductor for one graph."""
    if kernel.startswith("triton_"):
        found = re.match(r"triton_tem_.*(flex_attention(_backward)?)", kernel)
        return f"triton_tem {found[1]}" if found else ""
    product = re.match(r"nvjet_sm\d+_[a-z]+", kernel)
    if product:
        return product[0]
    name = re.split(r"[<(]", kernel.removeprefix("void "))[0].strip()
    return re.sub(r"_knob_.*", "", name)


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
            found.append(Row(canonical(row["operator"]), dtypes, card, version, name))
    for verdict in report["verdicts"]:
        kernels = [kernel["name"] for kernel in verdict["figures"].get("kernels", [])]
        # of attention, in reports of November 2026, cut at 60 letters
        kernels += re.findall(r", by (.+?): off from fp32", verdict["text"])
        kinds = [family(kernel) for kernel in kernels]
        found += [Row(kind, UNKNOWN, card, version, name) for kind in kinds if kind]
    return found
