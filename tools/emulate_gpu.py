"""What a GPU would compute, without one: static_gpu.py's stand-in, with results.

The stand-in's device memory is host memory that nothing fills. Here it is filled: an operator that torch
would run on the GPU first runs its own CUDA code, which checks dtypes, sides and layouts and allocates but
launches nothing, and then the CPU's operator writes its results into the same memory; a Triton kernel,
Inductor's or ours, is compiled for the GPU and then run by Triton's interpreter, program by program. Each
tensor that a kernel gets has addresses of its own, so that one byte read or written beyond it is an error,
even where the caching allocator's block goes on. Operators that lack a CUDA kernel for a dtype say so, as
they do on a card. What stays unseen: speed, races between programs, and the numerics of a GPU's own products
and attention.
"""

import ctypes
import inspect
import itertools
import math
import threading
import traceback
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

TABLE_BITS = 40  # of an emulated address: the place in a tensor; above them: which tensor
AT_ONCE = 1 << 17  # elements of a generated kernel's blocks


class Beyond(RuntimeError):
    """A kernel read or wrote outside of a tensor, or assumed an alignment that is not there."""


# ---------- the device's memory, as a CPU sees it
def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory of one of the stand-in's."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(buffer, dtype=torch.uint8)[: storage.nbytes() // tensor.itemsize * tensor.itemsize]
    whole = whole.view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_host(value: Any) -> Any:
    """An argument of a CUDA operator as the CPU's takes it."""
    if isinstance(value, Tensor):
        return on_host(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(value.initial_seed())
    return value


# ---------- operators
# They allocate or look at memory and compute nothing.
ONLY_MEMORY = set(
    """empty empty_strided as_strided view _reshape_alias resize_ set_ unfold record_stream _pin_memory
    is_pinned _copy_from _copy_from_and_resize _resize_output_ is_set_to view_as_real view_as_complex
    _unsafe_view detach alias _cudnn_init_dropout_state""".split()
)
# Their CUDA code reads results from the device, so it can't run
READ_BACK = {"nonzero", "_local_scalar_dense", "masked_select", "unique_consecutive", "_unique2", "unique_dim",
             "bincount", "equal", "repeat_interleave", "histc", "multinomial"}
ATTENTION = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]


def on_cpu(operator: Any) -> Any:
    """The operator, or its decomposition where it exists on GPUs only."""
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU"):
        return operator
    from torch._decomp import decomposition_table

    return decomposition_table.get(operator, operator)


class Operators:
    """CUDA operators that compute on the host. seen: {(name, dtypes of tensors)} of what ran."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, tuple[str, ...]]] = set()
        self.inside = threading.local()  # of torch's own CUDA code
        self.library = torch.library.Library("aten", "IMPL")
        self.real: dict[str, Any] = {}
        names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
        for name in sorted(names):
            plain, _, overload = name.removeprefix("aten::").partition(".")
            on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
            if plain in ONLY_MEMORY or not (on_cuda or plain == "copy_"):
                continue
            if "sparse" in plain or "Sparse" in overload or "nested" in plain:
                continue
            operator = getattr(getattr(torch.ops.aten, plain), overload or "default")
            if any(plain.startswith(attention) for attention in ATTENTION):
                backward = plain.endswith("_backward")
                call = self.attention(operator, backward)
            else:
                if plain not in READ_BACK:
                    self.real[name] = torch.library.get_kernel(operator, "CUDA")
                call = self.computed(name, plain, operator)
            self.library.impl(name.removeprefix("aten::"), call, "CUDA")

    def note(self, plain: str, *values: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
        self.seen.add((plain, tuple([str(x.dtype).removeprefix("torch.") for x in tensors])))

    def computed(self, name: str, plain: str, operator: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        places = [place for place, argument in enumerate(operator._schema.arguments)
                  if str(argument.type) == "Tensor"]

        def call(*args: Any, **kwargs: Any) -> Any:
            # x * 2 comes with a number where the operator has a tensor
            args = tuple([torch.tensor(value) if place in places and isinstance(value, (bool, int, float))
                          else value for place, value in enumerate(args)])
            inner = getattr(self.inside, "depth", 0)
            given = None
            if name in self.real:
                self.inside.depth = inner + 1
                try:
                    given = self.real[name].call_boxed(keys, *args, **kwargs)
                finally:
                    self.inside.depth = inner
                if inner:
                    return given
            if not inner:
                self.note(plain, args, kwargs)
            there, more = pytree.tree_map(to_host, (args, kwargs))
            found = on_cpu(operator)(*there, **more)
            return self.results(operator, given, found, args, kwargs, there, more)

        return call

    @staticmethod
    def results(operator: Any, given: Any, found: Any, args: Any, kwargs: Any, there: Any, more: Any) -> Any:
        """What the CPU found, in the tensors that the CUDA operator gave or took."""
        if not operator._schema.returns:
            return None
        its = {id(host): mine for host, mine in zip(pytree.tree_leaves((there, more)),
                                                    pytree.tree_leaves((args, kwargs)))}
        many = isinstance(found, (tuple, list))
        mine = given if isinstance(given, (tuple, list)) else [given] * (len(found) if many else 1)
        out = []
        for host, device in zip(found if many else [found], mine):
            if not isinstance(host, Tensor):
                out.append(host)
            elif id(host) in its:
                out.append(its[id(host)])
            else:
                fits = isinstance(device, Tensor) and device.is_cuda
                if not fits or device.shape != host.shape or device.dtype != host.dtype:
                    device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="cuda")
                on_host(device).copy_(host)
                out.append(device)
        return type(found)(out) if many else out[0]

    def attention(self, operator: Any, backward: bool) -> Any:
        """Fused attention, whose CUDA code can't run here: allocated as its shapes are registered, computed
        in fp32."""
        from torch import _meta_registrations as meta

        allocate = meta.global_decomposition_table["meta"][operator]
        names = [argument.name for argument in operator._schema.arguments]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(operator._opname, args[:3])
            made = allocate(*args, **kwargs)
            made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                    if isinstance(x, Tensor) and x.device.type == "meta" else x for x in made]
            by_name = dict(zip(names, args)) | kwargs
            found = fused_attention(by_name, backward)
            for device, host in zip(made, found):
                if host is not None:
                    on_host(device).copy_(host)
            return tuple(made)

        return call


def fused_attention(given: dict, backward: bool) -> list[Tensor]:
    """[output] or [gradients of query, key, value] of scaled_dot_product_attention, in fp32."""
    q, k, v = [on_host(given[name]).float() for name in ("query", "key", "value")]
    shape = k.shape
    groups = q.size(1) // k.size(1)
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    scale = given.get("scale")
    scale = q.size(-1) ** -0.5 if scale is None else scale
    scores = scale * (q @ k.mT)
    bias = given.get("attn_bias")
    if bias is not None and bias.numel():
        scores = scores + on_host(bias).float()
    if given.get("is_causal"):
        past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~past, -torch.inf)
    weights = scores.softmax(-1)
    if not backward:
        return [weights @ v]
    grad = on_host(given.get("grad_out", given.get("grad_out_"))).float()
    slope = grad @ v.mT
    slope = scale * weights * (slope - (slope * weights).sum(-1, keepdim=True))
    grad_k = (slope.mT @ q).view(shape[0], shape[1], groups, *shape[2:]).sum(2)
    grad_v = (weights.mT @ grad).view(shape[0], shape[1], groups, shape[2], -1).sum(2)
    return [slope @ k, grad_k, grad_v]


# ---------- Triton kernels
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
          "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
SYMBOLS = dict(tanh=np.tanh, exp=np.exp, exp2=np.exp2, log=np.log, log2=np.log2, log1p=np.log1p, expm1=np.expm1,
               sqrt=np.sqrt, rsqrt=lambda x: 1 / np.sqrt(x), sin=np.sin, cos=np.cos, pow=np.power, fabs=np.abs,
               abs=np.abs, floor=np.floor, ceil=np.ceil, trunc=np.trunc, nearbyint=np.rint, rint=np.rint,
               fmod=np.fmod, isnan=np.isnan, isinf=np.isinf, isinff=np.isinf, isnand=np.isnan, signbit=np.signbit,
               llrint=lambda x: np.rint(x).astype(np.int64), hypot=np.hypot, atan2=np.arctan2)


def as_float(data: np.ndarray, kind: str) -> Tensor:
    """Numbers as the interpreter holds them (bf16 and fp8 as unsigned integers) -> a tensor."""
    flat = torch.from_numpy(np.array(data, order="C"))  # a copy: broadcast arrays can't be viewed
    return flat.view(FLOATS[kind])


def of_float(values: Tensor, kind: str) -> np.ndarray:
    """The other way."""
    values = values.to(FLOATS[kind])
    if kind == "bf16":
        return values.view(torch.uint16).numpy()
    if kind.startswith("fp8"):
        return values.view(torch.uint8).numpy()
    return values.numpy()


class Addresses:
    """The tensors of a launch: each begins at a multiple of 2^40, and nothing else can be read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.begins: list[int] = []
        self.sizes: list[int] = []
        self.emulated: list[int] = []

    def add(self, name: str, tensor: Tensor) -> int:
        """-> the emulated address of the tensor's first element."""
        begin = tensor.data_ptr()
        places = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
        self.names.append(name)
        self.begins.append(begin)
        self.sizes.append((places + 1) * tensor.itemsize if tensor.numel() else 0)
        # in the middle of its own part of the address space; keeps its alignment
        self.emulated.append((len(self.names) << TABLE_BITS) + (1 << (TABLE_BITS - 1)) + begin % 4096)
        return self.emulated[-1]

    def real(self, pointers: np.ndarray, mask: np.ndarray, itemsize: int, kernel: str, doing: str) -> np.ndarray:
        """Host addresses. Raises Beyond for one outside of its tensor."""
        which = int(pointers.flat[0] >> np.uint64(TABLE_BITS)) - 1
        if not 0 <= which < len(self.names):
            raise Beyond(f"{kernel} {doing} an address that belongs to no tensor")
        place = (pointers - np.uint64(self.emulated[which])).view(np.int64)
        good = (place >= 0) & (place <= self.sizes[which] - itemsize)
        wrong = mask & ~good
        if wrong.any():
            byte = place[tuple(np.argwhere(wrong)[0])]
            raise Beyond(f"{kernel} {doing} byte {byte} of {self.names[which]}, which has {self.sizes[which]}")
        return np.where(good, place + self.begins[which], 0).astype(np.uint64)


class Interpreter:
    """Runs Triton kernels on the host, as compiled for the GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        from triton.runtime import interpreter

        self.module = interpreter
        self.builder = interpreter.interpreter_builder
        self.rewritten: dict[Any, Any] = {}
        self.library = library
        self.library.static_last_grid.restype = ctypes.POINTER(ctypes.c_uint)
        self.addresses: Addresses | None = None
        self.kernel = ""
        self.seen: set[str] = set()
        self.faults: list[str] = []  # what went wrong in a kernel; the trainer may go on without it
        self.repair()

    def repair(self) -> None:
        """Loads and stores within bounds; products, casts, reductions and libdevice that the interpreter
        lacks or gets wrong."""
        module = self.module
        handle = module.TensorHandle
        here = self
        base = module.InterpreterBuilder
        real_dot = base.create_dot
        real_cast = base.cast_impl

        def masked_load(builder, ptrs, mask, other, *_):
            kind = ptrs.get_element_ty()
            dtype = module._get_np_dtype(kind)
            filler = np.zeros_like(ptrs.data, dtype=dtype) if other is None else other.data
            at = here.located(ptrs, mask, "reads")
            return handle(module._interpreter.load(at, mask.data, filler, dtype), kind)

        def masked_store(builder, ptrs, value, mask, *_):
            return module._interpreter.store(here.located(ptrs, mask, "writes"), value.data, mask.data)

        def atomic(builder, operation, ptr, value, mask, sem, scope):
            at = here.located(ptr, mask, "adds to")
            if value.dtype.scalar.name == "bf16":
                assert operation == module._ir.ATOMIC_OP.FADD, operation
                add_bf16(at[mask.data], as_float(value.data, "bf16").float().numpy()[mask.data])
                return value
            operation = builder.ir_rmw_op_to_interpreter_rmw_op[operation]
            sem = builder.ir_sem_to_interpreter_sem[sem]
            done = module._interpreter.atomic_rmw(operation, at, value.data, mask.data, sem)
            return handle(done, value.dtype.scalar)

        def add_bf16(places, numbers):
            """The interpreter's atomics know no bf16. The sums are rounded once, a GPU rounds each time."""
            places, which = np.unique(places, return_inverse=True)
            all_of_them = np.ones(places.shape, bool)
            old = module._interpreter.load(places, all_of_them, np.zeros(places.shape, np.uint16), np.dtype(np.uint16))
            sums = as_float(old, "bf16").float().numpy()
            np.add.at(sums, which, numbers)
            module._interpreter.store(places, of_float(torch.from_numpy(sums), "bf16"), all_of_them)

        def cast(builder, source, kind):
            old = source.dtype.scalar.name
            new = kind.scalar.name
            if old in FLOATS and new in FLOATS:
                return handle(of_float(as_float(source.data, old), new), kind.scalar)
            if old in FLOATS and old not in ("fp32", "fp64", "fp16"):
                source = handle(of_float(as_float(source.data, old), "fp32"), module.tl.float32)
            if new in FLOATS and new not in ("fp32", "fp64", "fp16"):
                return handle(of_float(torch.from_numpy(source.data.astype(np.float32)), new), kind.scalar)
            return real_cast(builder, source, kind)

        def dot(builder, a, b, d, *more):
            sides = []
            for side in (a, b):
                name = side.dtype.scalar.name
                data = as_float(side.data, name).float().numpy() if name in FLOATS else side.data
                sides.append(handle(data, module.tl.float32) if name in FLOATS else side)
            return real_dot(builder, *sides, d, *more)

        def arithmetic(real):
            def call(builder, lhs, rhs, operation):
                name = lhs.dtype.scalar.name
                if name in ("bf16", "fp8e4nv", "fp8e5"):
                    x, y = [as_float(side.data, name).float().numpy() for side in (lhs, rhs)]
                    found = operation(x, y)
                    if found.dtype == bool:
                        return handle(found, module.tl.int1)
                    return handle(of_float(torch.from_numpy(np.asarray(found)), name), lhs.dtype.scalar)
                found = real(builder, lhs, rhs, operation)
                if found.data.dtype == bool:  # a comparison
                    found = handle(found.data, module.tl.int1)
                return found
            return call

        def extern(builder, library, path, symbol, values, kind, pure):
            plain = symbol.removeprefix("__nv_")
            function = SYMBOLS.get(plain) or SYMBOLS.get(plain.removesuffix("f")) or SYMBOLS.get(
                plain.removesuffix("d"))
            if function is None:
                raise NotImplementedError(f"libdevice's {symbol}")
            found = np.asarray(function(*[value.data for value in values]))
            return handle(found.astype(module._get_np_dtype(kind.scalar)), kind.scalar)

        base.create_masked_load = masked_load
        base.create_masked_store = masked_store
        base.create_atomic_rmw = atomic
        base.cast_impl = cast
        base.create_fp_to_fp = lambda builder, source, kind, mode: cast(builder, source, kind)
        base.create_dot = dot
        base.binary_op = arithmetic(base.binary_op)
        base.create_extern_elementwise = extern
        module.ReduceOps.generic_reduce = reduce_by_slices
        module.ScanOps.generic_scan = scan_by_slices

    def located(self, ptrs: Any, mask: Any, doing: str) -> np.ndarray:
        itemsize = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        mask = np.broadcast_to(mask.data, ptrs.data.shape)
        return self.addresses.real(ptrs.data, mask, itemsize, self.kernel, doing)

    def function(self, fn: Any) -> Any:
        """A kernel's Python function as the interpreter runs it."""
        if fn not in self.rewritten:
            self.rewritten[fn] = self.module.FunctionRewriter(fn).rewrite_ast()
        return self.rewritten[fn]

    @contextmanager
    def language(self):
        """Meanwhile triton.language computes."""
        from triton.language.extra import libdevice as names
        from triton.language.extra.cuda import libdevice
        from triton.runtime.jit import JITFunction

        tl = self.module.tl
        scope = self.module._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        self.module._patch_builtin(libdevice, self.builder, scope)
        for name in vars(names):
            if hasattr(libdevice, name) and not name.startswith("_"):
                scope.set_attr(names, name, getattr(libdevice, name))
        scope.set_attr(JITFunction, "__call__",
                       lambda jit, *args, **kwargs: self.function(jit.fn)(*args, **kwargs))
        try:
            yield
        finally:
            scope.restore()

    def launch(self, tuner: Any, values: dict) -> None:
        """Every program of the launch that the library saw last, of generated kernels in larger blocks.
        values: {parameter: value}."""
        fn = tuner.fn.fn
        name = fn.__name__
        counts = [self.library.static_last_grid()[i] for i in range(3)]
        self.kernel = name
        self.addresses = Addresses()
        constants = {parameter.name for parameter in inspect.signature(fn).parameters.values()
                     if "constexpr" in str(parameter.annotation)}
        args = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                kind = self.module.tl.str_to_ty(self.module.triton.runtime.jit.mangle_type(value), None)
                address = np.array([self.addresses.add(key, value)], np.uint64)
                args[key] = self.module.tl.tensor(self.module.TensorHandle(address, kind), kind)
            elif key in constants or value is None:
                args[key] = value
            else:
                args[key] = self.module._implicit_cvt(value)
        self.seen.add(name)
        if blocks := larger_blocks(tuner.inductor_meta, values):
            args |= blocks
            counts = [-(-values["xnumel"] // args["XBLOCK"]), 1, 1]
            if "YBLOCK" in blocks:
                counts[1] = -(-values["ynumel"] // args["YBLOCK"])
        run = self.function(fn)
        self.builder.set_grid_dim(*counts)
        with self.language(), np.errstate(all="ignore"):
            try:
                check_alignment(tuner, values)
                for place in itertools.product(*[range(count) for count in counts]):
                    self.builder.set_grid_idx(*place)
                    run(**args)
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.line for frame in frames if frame.name == fn.__name__]
                self.faults.append(f"{name}, at `{lines[-1] if lines else '?'}`: {type(error).__name__}: {error}")
                raise

    @contextmanager
    def in_place_of_the_gpu(self):
        """Meanwhile Inductor's launches, and our kernels' own, are interpreted after they were recorded."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        real = CachingAutotuner.run
        timed = CachingAutotuner.bench

        def run(tuner, *args, stream, benchmark_run=False, **kwargs):
            real(tuner, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)
            (launcher,) = tuner.launchers
            names = tuner.fn.arg_names
            values = dict(tuner.triton_meta.get("constants", {})) | dict(launcher.config.kwargs)
            values |= dict(zip(inspect.signature(launcher).parameters, args)) | kwargs
            missing = [name for name in names if name not in values]
            assert not missing, f"{tuner.fn.__name__}: no value for {missing}"
            values = {name: values[name] for name in names}
            self.launch(tuner, values)

        def bench(tuner, launcher, *args, **kwargs):
            return 1.0

        CachingAutotuner.run = run
        CachingAutotuner.bench = bench
        try:
            yield
        finally:
            CachingAutotuner.run = real
            CachingAutotuner.bench = timed


def larger_blocks(meta: dict, values: dict) -> dict[str, int]:
    """Block sizes with which a generated kernel takes few programs; its results don't depend on them. {} for
    kernels of other kinds."""
    blocks = {name: size for name, size in values.items() if name in ("XBLOCK", "YBLOCK")}
    wanted = {"Grid1D": 1, "Grid2D": 2}.get(meta.get("grid_type", ""), 0)
    if len(blocks) != wanted or "no_x_dim" in meta and meta["no_x_dim"]:
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


def check_alignment(tuner: Any, values: dict) -> None:
    """Raises Beyond where the kernel was compiled for addresses or numbers that are multiples of 16."""
    for meta in tuner.triton_meta.get("configs", []):
        for key, assumed in dict(meta).items() if isinstance(meta, dict) else []:
            name = tuner.fn.arg_names[key[0]]
            value = values.get(name)
            number = value.data_ptr() if isinstance(value, Tensor) else value
            if ["tt.divisibility", 16] in assumed and isinstance(number, int) and number % 16:
                raise Beyond(f"{tuner.fn.__name__} was compiled for multiples of 16: {name} is {number}")


def slices(operator: Any, tensors: Any, axis: int, i: int) -> tuple:
    return tuple([operator.to_tensor(np.take(x.handle.data, i, axis), x.dtype) for x in tensors])


def combined(operator: Any, before: tuple, here: tuple) -> tuple:
    found = operator.combine_fn.fn(*before, *here)
    return found if isinstance(found, tuple) else (found,)


def reduce_by_slices(operator: Any, tensors: Any) -> list:
    """ReduceOps.generic_reduce, a slice at a time."""
    asked = operator.axis
    tensors, axis = operator.unravel(tensors, asked)
    total = slices(operator, tensors, axis, 0)
    for i in range(1, tensors[0].handle.data.shape[axis]):
        total = combined(operator, total, slices(operator, tensors, axis, i))
    found = []
    for value, tensor in zip(total, tensors):
        data = value.handle.data
        shape = [n for place, n in enumerate(tensor.handle.data.shape) if place != axis]
        data = np.broadcast_to(data, shape) if shape else data.reshape(-1)[0]
        if operator.keep_dims:
            data = np.expand_dims(data, axis)
        found.append(operator.to_tensor(data, tensor.dtype))
    return found


def scan_by_slices(operator: Any, tensors: Any) -> list:
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
    return [operator.to_tensor(np.stack([np.broadcast_to(part, rest) for part in column], axis), x.dtype)
            for column, x in zip(found, tensors)]
