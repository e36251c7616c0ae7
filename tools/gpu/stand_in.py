"""A stand-in for a GPU: torch, Inductor and Triton run unchanged, and what lies below them is replaced.

stand_in.c stands for the driver, the CUDA runtime and cuBLAS. It presents itself as one of the cards in
cards.py, hands out address space within that card's memory, launches nothing, refuses what the GPU would
refuse, and writes down every launch, product, copy and wait.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from tools.run.cards import Card

if TYPE_CHECKING:  # torch is imported by the process that the library is in
    from torch._ops import OpOverload
    from torch.library import Library

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_python", "torch_cpu", "caffe2_nvrtc")
Note = Callable[..., None]  # Recorder.note()
Compute = Callable[..., None]  # of an operator, its args and kwargs: fills its results


# ---------- the library
def build(folder: Path | str, site: Path = SITE) -> Path:
    """Compiles stand_in.c into folder/libcuda.so.1; CUDA symbols of torch without a body there return 0."""
    source = (HERE / "stand_in.c").read_text()
    want = {"cuInit", "cuCtxSetLimit", "cuCtxGetLimit"}
    for name in LIBRARIES:
        path = site / f"torch/lib/lib{name}.so"
        if path.exists():
            done = subprocess.run(
                ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
            )
            want |= {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    ours = re.compile(
        r"(__)?cuda[A-Z]|cublas|cu(Ctx|Device|Driver|Func|Get|Init|Launch|Link|Mem|Module|Occ|"
        r"Pointer|Tensor|Stream|Event)"
    )
    have = set(re.findall(r"^API [\w* ]*?\**(\w+)\(", source, re.M))
    stubs = sorted(name for name in want - have if ours.match(name))
    library = Path(folder, "libcuda.so.1")
    (library.parent / "stubs.h").write_text(
        "".join([f"API int {name}(void) {{ return 0; }}\n" for name in stubs])
    )
    includes = [library.parent, *site.glob("nvidia/cu*/include"), site / "triton/backends/nvidia/include"]
    flags = "-shared -fPIC -O1 -w -Wl,-soname,libcuda.so.1 -ldl -lpthread".split()
    folders = [f"-I{path}" for path in includes]
    subprocess.run(["gcc", "-o", library, *folders, HERE / "stand_in.c", *flags], check=True)
    return library


def environment(
    library: Path, card: Card, ranks: int, cache: str | Path, computes: bool = False
) -> dict[str, str]:
    """What a process needs in its environment to see `ranks` such GPUs. computes: their results, too."""
    here = str(library.parent)
    env = os.environ | dict(
        LD_PRELOAD=str(library),
        LD_LIBRARY_PATH=here,
        TRITON_LIBCUDA_PATH=here,
        STATIC_COUNT=str(ranks),
        STATIC_NAME=card.name,
        STATIC_CC=str(card.capability),
        STATIC_SMS=str(card.processors),
        STATIC_THREADS=str(card.threads),
        STATIC_SHARED=str(card.shared),
        STATIC_MIB=str(round(1024 * card.GiB)),
        OMP_NUM_THREADS="1",
        PYTORCH_ALLOC_CONF="expandable_segments:False",  # which need more of the driver than there is here
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TRITON_CACHE_DIR=f"{cache}/triton",
        TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
    )
    # The process ends by os._exit(), and Python would count what torch left
    env["PYTHONWARNINGS"] = "ignore:resource_tracker"
    if computes:  # Inductor's own launcher drops the Python of a kernel, which the interpreter runs
        env |= dict(STATIC_COMPUTES="1", TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER="0")
        env["PYTHONWARNINGS"] = "ignore::UserWarning"  # torch's, on each operator that is replaced
    return env


# ---------- in a process with the library in place
class Recorder:
    """Starts and stops the library's record, and adds to it what only Python knows."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.file = tempfile.NamedTemporaryFile(suffix=".tsv")
        self.waits: list[str] = []
        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self.on_wait)
        self.library.static_on_wait(self.callback)

    def on_wait(self, what: bytes) -> None:
        stack = [
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()[:-1]
        ]
        own = [place for place in stack if place.startswith("train_gpt")][-1:] or stack[-1:]
        self.waits.append(f"{what.decode()} at {own[0]}")

    def note(self, *words: object) -> None:
        self.library.static_note("\t".join(map(str, words)).encode())

    def of(self, function: Callable[[], Any]) -> tuple[list[list[str]], list[str]]:
        """([[word]] of the lines that function() wrote, [wait])"""
        self.waits.clear()
        self.library.static_record(self.file.name.encode())
        try:
            function()
        finally:
            self.library.static_record(None)
        with open(self.file.name) as file:
            lines = [line.rstrip("\n").split("\t") for line in file]
        return lines, [*self.waits]


def replace_attention(torch: ModuleType, note: Note, compute: Compute | None = None) -> Library:
    """The fused kernels of dense attention write down their shapes and allocate their results. compute fills
    these."""
    from torch import _meta_registrations as meta

    library = torch.library.Library("aten", "IMPL")
    for kind, end in itertools.product(("flash", "efficient", "cudnn"), ("", "_backward")):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{end}").default

        def call(*args: Any, operator: OpOverload = operator, kind: str = kind, end: str = end,
                 **kwargs: Any) -> tuple[Any, ...]:  # fmt: skip
            """In the place of the fused kernel."""
            q, k = args[1:3] if end else args[:2]
            causal = kwargs.get("is_causal") or any(x is True for x in args)
            note("attention", kind, end[1:] or "forward", *q.shape, k.size(2), int(causal))
            made = []
            for x in meta.global_decomposition_table["meta"][operator](*args, **kwargs):
                on_meta = isinstance(x, torch.Tensor) and x.device.type == "meta"
                made.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=q.device)
                            if on_meta else x)  # fmt: skip
            if compute:
                compute(operator, args, kwargs, made)
            return tuple(made)

        library.impl(operator.name().removeprefix("aten::"), call, "CUDA")
    if not compute:  # its count steers the host
        library.impl("nonzero", lambda x: x.cpu().nonzero().to(x.device), "CUDA")
    return library


@contextmanager
def count_bytes(torch: ModuleType, note: Note, width: int) -> Iterator[None]:
    """Meanwhile Triton kernels note the bytes of their tensors, each once; of a table in which they look up
    or scatter rows, at most `width`: those rows."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    real = CachingAutotuner.run

    def run(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        """CachingAutotuner.run(), which notes what it launches."""
        tensors = {(x.data_ptr(), x.numel()): x for x in args if isinstance(x, torch.Tensor)}.values()
        name = self.fn.__name__
        by_row = "embedding" in name and any(x.dtype == torch.int64 for x in tensors)  # it reads tokens
        sizes = [min(x.nbytes, width) if by_row and x.dim() == 2 else x.nbytes for x in tensors]
        note("bytes", name, sum(sizes))
        return real(self, *args, **kwargs)

    with mock.patch.object(CachingAutotuner, "run", run):
        yield


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        pass
