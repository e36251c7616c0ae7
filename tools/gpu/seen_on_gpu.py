"""Which operators a CUDA card has been seen to run, by the reports in docs/gpu_results/:

    from tools.gpu.seen_on_gpu import seen
    seen("aten.mm", ("bfloat16",))

A report lists what ran outside of Inductor's generated kernels, with the dtypes of its tensors, each once.
Nothing here imports torch.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tools.gpu import results

# Operators that launch no kernel
VIEWS = set(
    """view _unsafe_view view_as as_strided transpose t permute expand expand_as slice select unsqueeze
    squeeze detach detach_ alias reshape _reshape_alias unflatten flatten split split_with_sizes chunk unbind
    narrow diagonal unfold empty empty_like empty_strided new_empty new_empty_strided lift_fresh resolve_conj
    resolve_neg item is_nonzero _local_scalar_dense record_stream set_ resize_""".split()
)


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


@cache
def known(folder: Path) -> set[tuple[str, tuple[str, ...]]]:
    """{(operator, dtypes)} in the reports."""
    found = set()
    for report in results.reports(folder):
        for operators in report["operators"].values():
            found |= {(canonical(row["operator"]), tuple(row["dtypes"])) for row in operators}
    return found


def seen(operator: str, dtypes: tuple[str, ...], folder: Path = results.FOLDER) -> bool:
    """Has a card run this operator on tensors of these dtypes, as dtypes_of() tells them? The operator as
    torch names it: aten.mm, aten.mm.out and aten::mm are the same."""
    return (canonical(operator), dtypes) in known(folder)
