"""Triton kernels on the stand-in for a GPU, with results: each is compiled for the GPU as always and then run
by Triton's interpreter, program by program, on the stand-in's memory.

Each tensor that a kernel is given has addresses of its own, so that one byte read or written beyond its end
is an error, even where the caching allocator's block goes on. A kernel that Inductor generated runs in larger
blocks than on the GPU, since the interpreter's time goes by programs; ours and flex attention's run as
launched. Below are also repairs of the interpreter: bf16 and fp8, libdevice, reductions by other functions
than sums and maxima.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import special
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

Tensors = tuple[tl.tensor, ...]
TABLE_BITS = 40  # of an emulated address: the place in a tensor; above them: which tensor
AT_ONCE = 1 << 17  # elements of a generated kernel's blocks
FLOATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
PACKED = ("bf16", "fp8e4nv", "fp8e5")  # which the interpreter holds as unsigned integers
# libdevice's functions, less __nv_ and the f of single precision
SYMBOLS: dict[str, Callable[..., np.ndarray]] = dict(
    erf=special.erf,
    tanh=np.tanh,
    exp=np.exp,
    exp2=np.exp2,
    log=np.log,
    log2=np.log2,
    log1p=np.log1p,
    expm1=np.expm1,
    sqrt=np.sqrt,
    rsqrt=lambda x: 1 / np.sqrt(x),
    sin=np.sin,
    cos=np.cos,
    pow=np.power,
    fabs=np.abs,
    abs=np.abs,
    floor=np.floor,
    ceil=np.ceil,
    trunc=np.trunc,
    nearbyint=np.rint,
    rint=np.rint,
    fmod=np.fmod,
    isnan=np.isnan,
    isinf=np.isinf,
    isnand=np.isnan,
    isinfd=np.isinf,
    llrint=lambda x: np.rint(x).astype(np.int64),
)


class Beyond(RuntimeError):
    """A kernel read or wrote outside of a tensor, or assumed an alignment that is not there."""


# ---------- memory
class Addresses:
    """The tensors of a launch: each begins at a multiple of 2^40, and nothing else can be read."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.names: list[str] = []
        self.begins: list[int] = []
        self.sizes: list[int] = []
        self.emulated: list[int] = []

    def add(self, name: str, tensor: Tensor, before: int = 0) -> int:
        """-> the emulated address of the tensor's first element, or of what would be that many elements
        before it, of which nothing can be read: the tensor is then a part of a larger one."""
        begin = tensor.data_ptr()
        places = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
        self.names.append(name)
        self.begins.append(begin)
        self.sizes.append((places + 1) * tensor.itemsize if tensor.numel() else 0)
        # in the middle of its own part of the address space; keeps its alignment
        self.emulated.append((len(self.names) << TABLE_BITS) + (1 << (TABLE_BITS - 1)) + begin % 4096)
        return self.emulated[-1] - before * tensor.itemsize

    def real(self, pointers: Handle, mask: np.ndarray, doing: str) -> np.ndarray:
        """Host addresses. Raises Beyond for one outside of its tensor."""
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        which = int(pointers.data.flat[0] >> np.uint64(TABLE_BITS)) - 1
        if not 0 <= which < len(self.names):
            raise Beyond(f"{self.kernel} {doing} an address that belongs to no tensor")
        place = (pointers.data - np.uint64(self.emulated[which])).view(np.int64)
        good = (place >= 0) & (place <= self.sizes[which] - itemsize)
        wrong = np.broadcast_to(mask, place.shape) & ~good
        if wrong.any():
            byte = place[tuple(np.argwhere(wrong)[0])]
            size = self.sizes[which]
            raise Beyond(f"{self.kernel} {doing} byte {byte} of {self.names[which]}, which has {size}")
        return np.where(good, place + self.begins[which], 0).astype(np.uint64)


def check_alignment(tuner: CachingAutotuner, values: dict[str, Any]) -> None:
    """Raises Beyond where the kernel was compiled for addresses or numbers that are multiples of 16."""
    for meta in tuner.triton_meta.get("configs", []):
        for key, assumed in dict(meta).items() if isinstance(meta, dict) else []:
            name = tuner.fn.arg_names[key[0]]
            value = values.get(name)
            number = value.data_ptr() if isinstance(value, Tensor) else value
            if ["tt.divisibility", 16] in assumed and isinstance(number, int) and number % 16:
                raise Beyond(f"{tuner.fn.__name__} was compiled for multiples of 16: {name} is {number}")


class Memory:
    """Loads, stores and atomic sums of the interpreter, within the tensors of the launch at hand."""

    addresses: Addresses

    def masked_load(
        self, builder: Builder, pointers: Handle, mask: Handle, other: Handle | None, *_: Any
    ) -> Handle:
        kind = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        filler = np.zeros_like(pointers.data, dtype=dtype) if other is None else other.data
        at = self.addresses.real(pointers, mask.data, "reads")
        return Handle(interpreter._interpreter.load(at, mask.data, filler, dtype), kind)

    def masked_store(self, builder: Builder, pointers: Handle, value: Handle, mask: Handle, *_: Any) -> None:
        at = self.addresses.real(pointers, mask.data, "writes")
        interpreter._interpreter.store(at, value.data, mask.data)

    def atomic(self, builder: Builder, operation: object, pointers: Handle, value: Handle, mask: Handle,
               sem: object, scope: object) -> Handle:  # fmt: skip
        at = self.addresses.real(pointers, mask.data, "adds to")
        if value.dtype.scalar.name == "bf16":
            assert operation == interpreter._ir.ATOMIC_OP.FADD, operation
            numbers = as_float(value.data, "bf16").float().numpy()
            add_bf16(at[mask.data], numbers[mask.data])
            return value
        operation = builder.ir_rmw_op_to_interpreter_rmw_op[operation]
        sem = builder.ir_sem_to_interpreter_sem[sem]
        found = interpreter._interpreter.atomic_rmw(operation, at, value.data, mask.data, sem)
        return Handle(found, value.dtype.scalar)


def add_bf16(places: np.ndarray, numbers: np.ndarray) -> None:
    """Atomic sums in bf16, which the interpreter does not know. Rounded once; a GPU rounds each time."""
    places, which = np.unique(places, return_inverse=True)
    everywhere = np.ones(places.shape, bool)
    zeros = np.zeros(places.shape, np.uint16)
    old = interpreter._interpreter.load(places, everywhere, zeros, np.dtype(np.uint16))
    sums = as_float(old, "bf16").float().numpy()
    np.add.at(sums, which, numbers)
    interpreter._interpreter.store(places, of_float(torch.from_numpy(sums), "bf16"), everywhere)


# ---------- numbers
def as_float(data: np.ndarray, kind: str) -> Tensor:
    """Numbers as the interpreter holds them -> a tensor."""
    return torch.from_numpy(np.array(data, order="C")).view(FLOATS[kind])  # a copy: it may be broadcast


def of_float(values: Tensor, kind: str) -> np.ndarray:
    """The other way, rounded as torch rounds."""
    values = values.to(FLOATS[kind])
    if kind == "bf16":
        return values.view(torch.uint16).numpy()
    if kind.startswith("fp8"):
        return values.view(torch.uint8).numpy()
    return values.numpy()


real_cast = interpreter.InterpreterBuilder.cast_impl
real_dot = interpreter.InterpreterBuilder.create_dot
real_binary = interpreter.InterpreterBuilder.binary_op


def cast(builder: Builder, source: Handle, kind: tl.dtype, *_: Any) -> Handle:
    """Between numbers of all kinds."""
    old = source.dtype.scalar.name
    new = kind.scalar.name
    if old in FLOATS and new in FLOATS:
        return Handle(of_float(as_float(source.data, old), new), kind.scalar)
    if old in PACKED:
        source = Handle(of_float(as_float(source.data, old), "fp32"), tl.float32)
    if new in PACKED:
        return Handle(of_float(torch.from_numpy(source.data.astype(np.float32)), new), kind.scalar)
    return real_cast(builder, source, kind)


def dot(builder: Builder, a: Handle, b: Handle, total: Handle, *more: Any) -> Handle:
    """A product of tiles, in fp32."""
    sides = []
    for side in (a, b):
        name = side.dtype.scalar.name
        if name in FLOATS:
            side = Handle(as_float(side.data, name).float().numpy(), tl.float32)
        sides.append(side)
    return real_dot(builder, *sides, total, *more)


def binary(
    builder: Builder, lhs: Handle, rhs: Handle, operation: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Handle:
    """Arithmetic and comparisons."""
    name = lhs.dtype.scalar.name
    if name in PACKED:
        x, y = [as_float(side.data, name).float().numpy() for side in (lhs, rhs)]
        found = np.asarray(operation(x, y))
        if found.dtype != bool:
            return Handle(of_float(torch.from_numpy(found), name), lhs.dtype.scalar)
    else:
        result = real_binary(builder, lhs, rhs, operation)
        found = result.data
        if found.dtype != bool:
            return result
    return Handle(found, tl.int1)


def extern(
    builder: Builder, library: str, path: str, symbol: str, values: list[Handle], kind: tl.dtype, pure: bool
) -> Handle:
    """A function of libdevice."""
    name = symbol.removeprefix("__nv_")
    function = SYMBOLS.get(name) or SYMBOLS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"libdevice's {symbol}")
    found = np.asarray(function(*[value.data for value in values]))
    return Handle(found.astype(interpreter._get_np_dtype(kind.scalar)), kind.scalar)


def check(builder: Builder, condition: Handle, message: str) -> None:
    """tl.device_assert(), by which Inductor's code checks indices within a tensor's dimension."""
    if not np.all(condition.data):
        raise IndexError(message)


def slices(operator: Operator, tensors: Tensors, axis: int, i: int | range) -> Tensors:
    return tuple([operator.to_tensor(np.take(x.handle.data, i, axis), x.dtype) for x in tensors])


def combined(operator: Operator, before: Tensors, here: Tensors) -> Tensors:
    found = operator.combine_fn.fn(*before, *here)
    return found if isinstance(found, tuple) else (found,)


def reduce_by_halves(operator: Operator, tensors: Tensors) -> list[tl.tensor]:
    """ReduceOps.generic_reduce, half of what is left at a time; sides are powers of two."""
    tensors, axis = operator.unravel(tensors, operator.axis)
    total = tensors
    size = tensors[0].handle.data.shape[axis]
    while size > 1:
        size //= 2
        first = slices(operator, total, axis, range(size))
        total = combined(operator, first, slices(operator, total, axis, range(size, 2 * size)))
    total = slices(operator, total, axis, 0)
    found = []
    for value, tensor in zip(total, tensors):
        data = value.handle.data
        shape = [n for place, n in enumerate(tensor.handle.data.shape) if place != axis]
        data = np.broadcast_to(data, shape) if shape else data.reshape(-1)[0]
        if operator.keep_dims:
            data = np.expand_dims(data, axis)
        found.append(operator.to_tensor(data, tensor.dtype))
    return found


def scan_by_slices(operator: Operator, tensors: Tensors) -> list[tl.tensor]:
    """ScanOps.generic_scan, a slice at a time."""
    axis = operator.axis
    total = slices(operator, tensors, axis, 0)
    found = [[value.handle.data] for value in total]
    shape = tensors[0].handle.data.shape
    for i in range(1, shape[axis]):
        total = combined(operator, total, slices(operator, tensors, axis, i))
        for column, value in zip(found, total):
            column.append(value.handle.data)
    rest = [n for place, n in enumerate(shape) if place != axis]
    stacked = [np.stack([np.broadcast_to(part, rest) for part in column], axis) for column in found]
    return [operator.to_tensor(data, x.dtype) for data, x in zip(stacked, tensors)]


def repair(memory: Memory) -> None:
    """From now on the interpreter does as the functions above do."""
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = lambda *args: memory.masked_load(*args)
    builder.create_masked_store = lambda *args: memory.masked_store(*args)
    builder.create_atomic_rmw = lambda *args: memory.atomic(*args)
    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.create_dot = dot
    builder.binary_op = binary
    builder.create_extern_elementwise = extern
    builder.create_assert = check
    # Else device_assert() does nothing. Integers may overflow, as in hashes.
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "debug", True)
    object.__setattr__(options, "sanitize_overflow", False)
    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter.ScanOps.generic_scan = scan_by_slices


# ---------- launches
def rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's Python function as the interpreter runs it; it keeps those that it has made."""
    return interpreter.InterpretedFunction(fn).rewrite()


def larger_blocks(meta: dict[str, Any], values: dict[str, Any]) -> dict[str, int]:
    """Block sizes with which a generated kernel takes few programs; its results don't depend on them. {} for
    kernels of other kinds. meta: what Inductor says of the kernel."""
    blocks = {name: size for name, size in values.items() if name in ("XBLOCK", "YBLOCK")}
    wanted = {"Grid1D": 1, "Grid2D": 2}.get(meta.get("grid_type", ""), 0)
    if len(blocks) != wanted or meta.get("no_x_dim"):
        return {}
    room = AT_ONCE // math.prod(blocks.values())
    for name, size in values.items():
        if name.endswith("_BLOCK") or name == "RBLOCK":
            room //= size
        elif name in ("r0_numel", "rnumel") and "R0_BLOCK" not in values:
            room //= 1 << (int(size) - 1).bit_length()
    for name in blocks:
        numel = values[name[0].lower() + "numel"]
        while room > 1 and blocks[name] < numel:
            if numel % blocks[name] == 0 and numel % (2 * blocks[name]):
                break  # without a mask, since the blocks end where the numbers end
            blocks[name] *= 2
            room //= 2
    return blocks


class Interpreter:
    """Runs kernels after they were launched. seen: names of those that ran; faults: what went wrong in one,
    since the trainer may go on without it."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.seen: set[str] = set()
        self.faults: list[str] = []
        repair(self.memory)

    @contextmanager
    def language(self) -> Iterator[None]:
        """Meanwhile triton.language computes."""
        scope = interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        interpreter._patch_builtin(libdevice, interpreter.interpreter_builder, scope)
        for name in vars(libdevice_names):
            if hasattr(libdevice, name) and not name.startswith("_"):
                scope.set_attr(libdevice_names, name, getattr(libdevice, name))

        def call(jit: JITFunction, *args: Any, **kwargs: Any) -> Any:
            return rewritten(jit.fn)(*args, **kwargs)

        scope.set_attr(JITFunction, "__call__", call)
        try:
            yield
        finally:
            scope.restore()

    def arguments(
        self, fn: Callable[..., Any], values: dict[str, Any], before: dict[str, int]
    ) -> dict[str, Any]:
        """values {parameter: value} as the interpreter takes them. before: see Addresses.add()."""
        parameters = inspect.signature(fn).parameters
        found = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                kind = tl.str_to_ty(mangle_type(value), None)
                address = np.array([self.memory.addresses.add(name, value, before.get(name, 0))], np.uint64)
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
        if blocks:
            counts = [-(-values["xnumel"] // blocks["XBLOCK"]), 1, 1]
            if "YBLOCK" in blocks:
                counts[1] = -(-values["ynumel"] // blocks["YBLOCK"])
        places = itertools.product(*[range(count) for count in counts])
        try:
            check_alignment(tuner, values)
        except Beyond as error:
            self.faults.append(str(error))
            raise
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
        self.seen.add(fn.__name__)
        self.memory.addresses = Addresses(fn.__name__)
        args = self.arguments(fn, values, before or {})
        function = rewritten(fn)
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*counts)
        with self.language(), np.errstate(all="ignore"):
            try:
                for place in places:
                    builder.set_grid_idx(*place)
                    function(**args)
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.line for frame in frames if frame.name == fn.__name__]
                where = lines[-1] if lines else "?"
                self.faults.append(f"{fn.__name__}, at `{where}`: {type(error).__name__}: {error}")
                raise

    @contextmanager
    def in_place_of_the_gpu(self) -> Iterator[None]:
        """Meanwhile compiled code's launches are interpreted after they were recorded."""
        self.last_grid = ctypes.CDLL("libcuda.so.1").static_last_grid
        self.last_grid.restype = ctypes.POINTER(ctypes.c_uint)
        real = CachingAutotuner.run
        timed = CachingAutotuner.bench

        def run(tuner: CachingAutotuner, *args: Any, stream: Any, **kwargs: Any) -> None:
            real(tuner, *args, stream=stream, **kwargs)
            (launcher,) = tuner.launchers
            values = dict(tuner.triton_meta.get("constants", {})) | dict(launcher.config.kwargs)
            values |= dict(zip(inspect.signature(launcher).parameters, args)) | kwargs
            self.launch(tuner, {name: values[name] for name in tuner.fn.arg_names})

        CachingAutotuner.run = run
        CachingAutotuner.bench = lambda *_, **__: 1.0  # of a configuration that is tried
        try:
            yield
        finally:
            CachingAutotuner.run = real
            CachingAutotuner.bench = timed
