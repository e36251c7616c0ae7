"""Triton kernels on the stand-in for a GPU, with results: each is compiled for the GPU as always and then run
by Triton's interpreter, program by program, on the stand-in's memory.

Each tensor that a kernel is given has addresses of its own, so that one byte read or written beyond its end
is an error, even where the caching allocator's block goes on. A kernel that Inductor generated runs in larger
blocks than on the GPU, since the interpreter's time goes by programs; ours and flex attention's run as
launched. Below are also repairs of the interpreter: bf16 and fp8, libdevice, reductions in one piece. What no
preset's toy run needs, the interpreter does as it can.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton import language as tl
from triton.language.extra import libdevice as libdevice_names
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import ReduceScanOpInterface as Operator
from triton.runtime.interpreter import TensorHandle as Handle
from triton.runtime.jit import JITFunction, mangle_type

TABLE_BITS = 40  # of an emulated address: the place in a tensor; above them: which tensor
AT_ONCE = 1 << 17  # elements of a generated kernel's blocks
# torch's names of Triton's dtypes, where they differ
NAMES = dict(int1="bool", fp16="float16", bf16="bfloat16", fp32="float32", fp64="float64",
             fp8e4nv="float8_e4m3fn", fp8e5="float8_e5m2")  # fmt: skip
# What the interpreter holds as unsigned integers
PACKED = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
# Reductions by Inductor's functions of these names, which the interpreter makes number by number
WHOLE = dict(maximum=np.max, minimum=np.min, _any_combine=np.any)


# ---------- numbers
def dtype_of(kind: tl.dtype) -> torch.dtype:
    return getattr(torch, NAMES.get(kind.scalar.name, kind.scalar.name))


def to_tensor(handle: Handle) -> Tensor:
    """Numbers as the interpreter holds them -> a tensor."""
    values = torch.from_numpy(np.array(handle.data, order="C"))  # a copy: it may be broadcast
    dtype = dtype_of(handle.dtype)
    return values.view(dtype) if PACKED.get(dtype) == values.dtype else values


def to_handle(values: Tensor, kind: tl.dtype) -> Handle:
    """The other way, rounded as torch rounds."""
    values = values.to(dtype_of(kind))
    return Handle(values.view(PACKED.get(values.dtype, values.dtype)).numpy(), kind.scalar)


real_dot = interpreter.InterpreterBuilder.create_dot
real_reduce = interpreter.ReduceOps.generic_reduce


def cast(builder: Builder, source: Handle, kind: tl.dtype, *_: Any) -> Handle:
    """Between numbers of all kinds."""
    return to_handle(to_tensor(source), kind)


def dot(builder: Builder, a: Handle, b: Handle, total: Handle, *more: Any) -> Handle:
    """A product of tiles, in fp32."""
    sides = [to_handle(to_tensor(side), tl.float32) for side in (a, b)]
    return real_dot(builder, *sides, total, *more)


def extern(
    builder: Builder, library: str, path: str, symbol: str, values: list[Handle], kind: tl.dtype, pure: bool
) -> Handle:
    """A function of libdevice in single precision, such as __nv_expf: torch's of the same name."""
    function = getattr(torch, symbol.removeprefix("__nv_").removesuffix("f"))
    return to_handle(function(*[to_tensor(value) for value in values]), kind)


def reduce(operator: Operator, tensors: tuple[tl.tensor, ...]) -> Any:
    whole = WHOLE.get(operator.combine_fn.__name__)
    return operator.min_max(tensors, whole) if whole else real_reduce(operator, tensors)


# ---------- memory
class Memory:
    """The tensors of a launch, each of which begins at a multiple of 2^40: nothing else can be read."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.names: list[str] = []
        self.begins: list[int] = []
        self.sizes: list[int] = []
        self.emulated: list[int] = []

    def add(self, name: str, tensor: Tensor, before: int = 0) -> int:
        """-> the emulated address of the tensor's first element, or of what would be that many elements
        before it, of which nothing can be read: the tensor is then a part of a larger one."""
        places = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
        self.names.append(name)
        self.begins.append(tensor.data_ptr())
        self.sizes.append((places + 1) * tensor.itemsize if tensor.numel() else 0)
        # in the middle of its own part of the address space
        self.emulated.append((len(self.names) << TABLE_BITS) + (1 << (TABLE_BITS - 1)))
        return self.emulated[-1] - before * tensor.itemsize

    def real(self, pointers: Handle, mask: np.ndarray, doing: str) -> np.ndarray:
        """Host addresses. Raises IndexError for one outside of its tensor."""
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        which = int(pointers.data.flat[0] >> np.uint64(TABLE_BITS)) - 1
        place = (pointers.data - np.uint64(self.emulated[which])).view(np.int64)
        good = (place >= 0) & (place <= self.sizes[which] - itemsize)
        wrong = np.broadcast_to(mask, place.shape) & ~good
        if wrong.any():
            byte = place[tuple(np.argwhere(wrong)[0])]
            size = self.sizes[which]
            raise IndexError(f"{self.kernel} {doing} byte {byte} of {self.names[which]}, which has {size}")
        return np.where(good, place + self.begins[which], 0).astype(np.uint64)

    def load(self, builder: Builder, pointers: Handle, mask: Handle, other: Handle | None, *_: Any) -> Handle:
        kind = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        filler = np.zeros_like(pointers.data, dtype=dtype) if other is None else other.data
        at = self.real(pointers, mask.data, "reads")
        return Handle(interpreter._interpreter.load(at, mask.data, filler, dtype), kind)

    def store(self, builder: Builder, pointers: Handle, value: Handle, mask: Handle, *_: Any) -> None:
        at = self.real(pointers, mask.data, "writes")
        interpreter._interpreter.store(at, value.data, mask.data)

    def atomic(self, builder: Builder, operation: object, pointers: Handle, value: Handle, mask: Handle,
               *_: Any) -> Handle:  # fmt: skip
        """Sums, also in bf16, which the interpreter does not know."""
        assert operation in (interpreter._ir.ATOMIC_OP.ADD, interpreter._ir.ATOMIC_OP.FADD), operation
        at = self.real(pointers, mask.data, "adds to")
        places, which = np.unique(at[mask.data], return_inverse=True)
        everywhere = np.ones(places.shape, bool)
        filler = np.zeros(places.shape, value.data.dtype)
        old = interpreter._interpreter.load(places, everywhere, filler, filler.dtype)
        sums = to_tensor(Handle(old, value.dtype))
        sums.index_add_(0, torch.from_numpy(which), to_tensor(value)[torch.from_numpy(mask.data)])
        interpreter._interpreter.store(places, to_handle(sums, value.dtype).data, everywhere)
        return value


# ---------- launches
def larger_blocks(meta: dict[str, Any], values: dict[str, Any]) -> dict[str, int]:
    """Block sizes with which a generated kernel takes few programs; its results don't depend on them. {} for
    kernels of other kinds. meta: what Inductor says of the kernel."""
    names = dict(Grid1D=["XBLOCK"], Grid2D=["XBLOCK", "YBLOCK"]).get(meta.get("grid_type", ""), [])
    if not names or not values.keys() >= {*names}:
        return {}
    # numbers of a row, which a persistent reduction reads at once
    row = values.get("R0_BLOCK") or 1 << (values.get("r0_numel", 1) - 1).bit_length()
    room = max(1, AT_ONCE // row)
    found = {}
    for name in names:
        numel = values[name[0].lower() + "numel"]
        # a divisor, since a kernel has no mask where its blocks end where the numbers end
        found[name] = max(values[name], min(numel & -numel, room))
        room = max(1, room // found[name])
    return found


class Interpreter:
    """Runs kernels after they were launched. faults: what went wrong in one, since the trainer may go on
    without it."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.memory = Memory("")
        builder = interpreter.InterpreterBuilder
        builder.create_masked_load = lambda *args: self.memory.load(*args)
        builder.create_masked_store = lambda *args: self.memory.store(*args)
        builder.create_atomic_rmw = lambda *args: self.memory.atomic(*args)
        builder.cast_impl = cast
        builder.create_fp_to_fp = cast
        builder.create_dot = dot
        builder.create_extern_elementwise = extern
        # Else device_assert() does nothing, by which Inductor's code checks indices. Integers may overflow,
        # as in hashes.
        options = interpreter.interpreter_builder.options
        object.__setattr__(options, "debug", True)
        object.__setattr__(options, "sanitize_overflow", False)
        interpreter.ReduceOps.generic_reduce = reduce

    @contextmanager
    def language(self) -> Iterator[None]:
        """Meanwhile triton.language computes."""
        scope = interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        interpreter._patch_builtin(libdevice, interpreter.interpreter_builder, scope)
        for name in vars(libdevice_names):
            if hasattr(libdevice, name) and not name.startswith("_"):
                scope.set_attr(libdevice_names, name, getattr(libdevice, name))

        def call(jit: JITFunction, *args: Any, **kwargs: Any) -> Any:
            return interpreter.InterpretedFunction(jit.fn).rewrite()(*args, **kwargs)

        scope.set_attr(JITFunction, "__call__", call)
        try:
            yield
        finally:
            scope.restore()

    def arguments(
        self, fn: Callable[..., Any], values: dict[str, Any], before: dict[str, int]
    ) -> dict[str, Any]:
        """values {parameter: value} as the interpreter takes them. before: see Memory.add()."""
        parameters = inspect.signature(fn).parameters
        found = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                kind = tl.str_to_ty(mangle_type(value), None)
                address = np.array([self.memory.add(name, value, before.get(name, 0))], np.uint64)
                found[name] = tl.tensor(Handle(address, kind), kind)
            elif value is None or "constexpr" in str(parameters[name].annotation):
                found[name] = value
            else:
                found[name] = interpreter._implicit_cvt(value)
        return found

    def launch(self, tuner: CachingAutotuner, values: dict[str, Any]) -> None:
        """Every program of the launch that the library saw last. values: {parameter: value}."""
        counts = self.last_grid()[:3]
        blocks = larger_blocks(tuner.inductor_meta, values)
        for place, (name, size) in enumerate(blocks.items()):
            counts[place] = -(-values[name[0].lower() + "numel"] // size)
        places = itertools.product(*[range(count) for count in counts])
        self.run_programs(tuner.fn.fn, values | blocks, counts, places)

    def run_programs(
        self,
        fn: Callable[..., Any],
        values: dict[str, Any],
        counts: Sequence[int],
        places: Iterable[tuple[int, ...]],
        before: dict[str, int] | None = None,
    ) -> None:
        """The programs at these places of a grid of `counts`. values: {parameter: value}; before:
        {parameter: elements of a tensor that lie before the part of it that is given}."""
        self.memory = Memory(fn.__name__)
        args = self.arguments(fn, values, before or {})
        function = interpreter.InterpretedFunction(fn).rewrite()
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*counts)
        with self.language(), np.errstate(all="ignore"):
            try:
                for place in places:
                    builder.set_grid_idx(*place)
                    function(**args)
            except Exception as error:
                self.faults.append(f"{fn.__name__}: {type(error).__name__}: {error}")
                raise

    @contextmanager
    def in_place_of_the_gpu(self) -> Iterator[None]:
        """Meanwhile compiled code's launches are interpreted after they were recorded."""
        self.last_grid = ctypes.CDLL("libcuda.so.1").static_last_grid
        self.last_grid.restype = ctypes.POINTER(ctypes.c_uint)
        real = CachingAutotuner.run

        def run(tuner: CachingAutotuner, *args: Any, stream: Any, **kwargs: Any) -> None:
            real(tuner, *args, stream=stream, **kwargs)
            (launcher,) = tuner.launchers
            values = dict(tuner.triton_meta.get("constants", {})) | dict(launcher.config.kwargs)
            values |= dict(zip(inspect.signature(launcher).parameters, args)) | kwargs
            self.launch(tuner, {name: values[name] for name in tuner.fn.arg_names})

        times = mock.patch.object(CachingAutotuner, "bench", lambda *_, **__: 1.0)  # of what is tried
        with mock.patch.object(CachingAutotuner, "run", run), times:
            yield
