"""What a GPU would compute, without one: static.py's stand-in, with results.

The stand-in's device memory is host memory that nothing fills. Here it is filled: an operator that torch
would run on the GPU first runs its own CUDA code, which checks dtypes, sides and layouts and allocates but
launches nothing, and then the CPU's operator writes its results into the same memory; Triton kernels
are interpreted (interpret_kernels.py). An operator that lacks a CUDA kernel for a dtype says so, as it does
on a card. What stays unseen: speed, races between programs, and the numerics of a GPU's own products and
attention.
"""

import contextlib
import ctypes
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload

from tools.gpu import seen_on_gpu


# ---------- the device's memory, as a CPU sees it
def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory of one of the stand-in's."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    numbers = storage.nbytes() // tensor.itemsize
    whole = torch.frombuffer(buffer, dtype=torch.uint8)[: numbers * tensor.itemsize].view(tensor.dtype)
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
READ_BACK = set(
    """nonzero _local_scalar_dense masked_select unique_consecutive _unique2 unique_dim bincount equal
    repeat_interleave multinomial""".split()
)
ATTENTION = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]


def bags(indices: Tensor, offsets: Tensor) -> Tensor:
    """The bag of each index of an embedding_bag."""
    return torch.searchsorted(offsets, torch.arange(len(indices)), right=True) - 1


def bag_weights_gradient(grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """_embedding_bag_per_sample_weights_backward(), for the reason that bag_gradient() gives."""
    return (grad[bags(indices, offsets)] * weight[indices]).sum(-1)


def bag_gradient(grad: Tensor, indices: Tensor, offsets: Tensor, *more: Any) -> Tensor:
    """_embedding_bag_backward() of sums. The operator of the CPU needs results of its own forward pass, which
    CUDA's has in other shapes."""
    rows, by_frequency, mode, _, weights = more[3:8]
    assert mode == 0 and not by_frequency
    bag = bags(indices, offsets)
    each = grad[bag] if weights is None else grad[bag] * weights[:, None]
    return grad.new_zeros(rows, grad.size(1)).index_add_(0, indices, each)


def on_cpu(operator: OpOverload) -> Callable[..., Any]:
    """The operator; where it exists on GPUs only, its decomposition."""
    if operator is torch.ops.aten._embedding_bag_backward.default:
        return bag_gradient
    if operator is torch.ops.aten._embedding_bag_per_sample_weights_backward.default:
        return bag_weights_gradient
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU"):
        return operator
    from torch._decomp import decomposition_table

    return decomposition_table.get(operator, operator)


def calling_line() -> str:
    """Where the trainer called what runs now, as `hidden:1234`. Compiled code has no lines of its own: the
    call of the compiled function. The backward pass runs in a thread of autograd's, without a caller."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("train_gpt.py"):
            return f"{code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


def without_overrides() -> None:
    """Takes back the Triton kernels by which torch 2.12 and newer replace some operators, such as a bmm that
    is an outer product: computed() can't wrap the way in which they call what they replaced. They stay
    unseen."""
    for module in ("triton_utils", "cutedsl_utils"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"torch._native.{module}").deregister_op_overrides()


class Operators:
    """CUDA operators that compute on the host. seen: {(name, dtypes of tensors): the line that called it
    first}, of what ran."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, tuple[str, ...]], str] = {}
        self.inside = threading.local()  # of torch's own CUDA code
        without_overrides()
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
        what = (f"aten.{plain}", seen_on_gpu.dtypes_of(pytree.tree_leaves(values)))
        if what not in self.seen:
            self.seen[what] = calling_line()

    def computed(self, name: str, plain: str, operator: OpOverload) -> Callable[..., Any]:
        """The CUDA kernel of an operator that checks as CUDA's and computes as the CPU's."""
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        places = [place for place, argument in enumerate(operator._schema.arguments)
                  if str(argument.type) == "Tensor"]

        def call(*args: Any, **kwargs: Any) -> Any:
            """The operator's results, on the GPU."""
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
    def results(operator: OpOverload, given: Any, found: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                there: tuple[Any, ...], more: dict[str, Any]) -> Any:
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
                if fits and device.shape != host.shape and operator._opname == "_embedding_bag":
                    out.append(device)  # for the backward pass alone: see bag_gradient()
                    continue
                if not fits or device.shape != host.shape or device.dtype != host.dtype:
                    device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="cuda")
                on_host(device).copy_(host)
                out.append(device)
        return type(found)(out) if many else out[0]

    def attention(self, operator: OpOverload, backward: bool) -> Callable[..., tuple[Any, ...]]:
        """Fused attention, whose CUDA code can't run here: allocated as its shapes are registered, computed
        in fp32."""
        from torch import _meta_registrations as meta

        allocate = meta.global_decomposition_table["meta"][operator]
        names = [argument.name for argument in operator._schema.arguments]

        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
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


def fused_attention(given: dict[str, Any], backward: bool) -> list[Tensor]:
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
