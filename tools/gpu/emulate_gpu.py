"""What a GPU would compute, without one: the stand-in of stand_in.py, with results.

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
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload

from tools.gpu import seen_on_gpu, stand_in


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
    return on_host(value) if isinstance(value, Tensor) and value.is_cuda else value


# ---------- operators
# They allocate or look at memory and compute nothing.
ONLY_MEMORY = set(
    """empty empty_strided as_strided view _reshape_alias resize_ set_ unfold record_stream _pin_memory
    is_pinned _copy_from _copy_from_and_resize _resize_output_ is_set_to _unsafe_view detach alias""".split()
)
# Their CUDA code reads results from the device, so it can't run
READ_BACK = set("nonzero _local_scalar_dense masked_select equal repeat_interleave".split())


def bag_gradient(grad: Tensor, indices: Tensor, offsets: Tensor, *more: Any) -> Tensor:
    """_embedding_bag_backward() of sums without weights. The operator of the CPU needs results of its own
    forward pass, which CUDA's has in other shapes."""
    rows = more[3]
    bag = torch.searchsorted(offsets, torch.arange(len(indices)), right=True) - 1
    return grad.new_zeros(rows, grad.size(1)).index_add_(0, indices, grad[bag])


def on_cpu(operator: OpOverload) -> Callable[..., Any]:
    """The operator; where it exists on GPUs only, its decomposition."""
    if operator is torch.ops.aten._embedding_bag_backward.default:
        return bag_gradient
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU"):
        return operator
    from torch._decomp import decomposition_table

    return decomposition_table.get(operator, operator)


def results(given: Any, found: Any, args: Any, there: Any) -> Any:
    """What the CPU found, in the tensors that the CUDA operator gave or took. args: what it took, and there:
    the same on the host."""
    taken = {id(host): mine for host, mine in zip(pytree.tree_leaves(there), pytree.tree_leaves(args))}
    given = pytree.tree_leaves(given)
    leaves, form = pytree.tree_flatten(found)
    out = []
    for place, host in enumerate(leaves):
        if isinstance(host, Tensor):
            if id(host) in taken:
                host = taken[id(host)]
            elif place < len(given) and given[place] is not None:
                # embedding_bag's other results, for its gradient alone, have other shapes: see bag_gradient()
                if given[place].shape == host.shape:
                    on_host(given[place]).copy_(host)
                host = given[place]
            else:
                device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="cuda")
                on_host(device).copy_(host)
                host = device
        out.append(host)
    return pytree.tree_unflatten(out, form)


class Operators:
    """CUDA operators that compute on the host. seen: {(name, dtypes of tensors)} of what ran."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, tuple[str, ...]]] = set()
        self.inside = threading.local()  # of torch's own CUDA code
        # Triton kernels by which torch 2.12 and newer replace some operators, such as a bmm that is an outer
        # product: computed() can't wrap the way in which they call what they replaced. They stay unseen
        for module in ("triton_utils", "cutedsl_utils"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"torch._native.{module}").deregister_op_overrides()
        self.attention = stand_in.replace_attention(torch, lambda *_: None, self.compute_attention)
        self.library = torch.library.Library("aten", "IMPL")
        for name in sorted(torch._C._dispatch_get_all_op_names()):
            plain, _, overload = name.removeprefix("aten::").partition(".")
            on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") or plain == "copy_"
            if not name.startswith("aten::") or plain in ONLY_MEMORY or not on_cuda:
                continue
            if any(word in name.lower() for word in ("sparse", "nested", "_scaled_dot_product")):
                continue
            operator = getattr(getattr(torch.ops.aten, plain), overload or "default")
            self.library.impl(name.removeprefix("aten::"), self.computed(plain, operator), "CUDA")

    def note(self, plain: str, *values: Any) -> None:
        self.seen.add((f"aten.{plain}", seen_on_gpu.dtypes_of(pytree.tree_leaves(values))))

    def computed(self, plain: str, operator: OpOverload) -> Callable[..., Any]:
        """The CUDA kernel of an operator that checks as CUDA's and computes as the CPU's."""
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        real = None if plain in READ_BACK else torch.library.get_kernel(operator, "CUDA")
        places = [place for place, argument in enumerate(operator._schema.arguments)
                  if str(argument.type) == "Tensor"]

        def call(*args: Any, **kwargs: Any) -> Any:
            """The operator's results, on the GPU."""
            # x * 2 comes with a number where the operator has a tensor
            args = tuple([torch.tensor(value) if place in places and isinstance(value, (bool, int, float))
                          else value for place, value in enumerate(args)])
            inner = getattr(self.inside, "now", False)
            given = None
            if real:
                self.inside.now = True
                try:
                    given = real.call_boxed(keys, *args, **kwargs)
                finally:
                    self.inside.now = inner
                if inner:
                    return given
            if not inner:
                self.note(plain, args, kwargs)
            there, more = pytree.tree_map(to_host, (args, kwargs))
            found = on_cpu(operator)(*there, **more)
            return results(given, found, (args, kwargs), (there, more))

        return call

    def compute_attention(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Any]
    ) -> None:
        """Fused attention, whose CUDA code can't run here."""
        self.note(operator._opname, args[:3])
        names = [argument.name for argument in operator._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        grad = given.get("grad_out", given.get("grad_out_"))
        with ThreadPoolExecutor(1) as other:  # in this one torch keeps no graph: it is below autograd
            found = other.submit(fused_attention, given, grad).result()
        for device, host in zip(made, found):
            on_host(device).copy_(host)


def fused_attention(given: dict[str, Any], grad: Tensor | None) -> Sequence[Tensor]:
    """[output] or, with its gradient, [gradients of query, key, value] of scaled_dot_product_attention, by
    the CPU in fp32."""
    inputs = [on_host(given[name]).float().requires_grad_() for name in ("query", "key", "value")]
    bias = given.get("attn_bias")
    if bias is not None:
        bias = on_host(bias).float()
    more = dict(is_causal=bool(given.get("is_causal")), scale=given.get("scale"), enable_gqa=True)
    y = F.scaled_dot_product_attention(*inputs, attn_mask=bias, **more)
    if grad is None:
        return [y.detach()]
    return torch.autograd.grad(y, inputs, on_host(grad).float())
