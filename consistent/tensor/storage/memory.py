"""Methods that treat a tensor as a window onto memory.

These are ``data``, ``set_``, ``resize_``, ``as_strided`` and ``new``. A global tensor's memory is
that of its shard, and its shape is part of its spec. So a tensor may take over the memory and the
layout of another tensor, but cannot become a window onto another part of its own memory.
"""

from __future__ import annotations

from typing import Any

import torch

from mirrored.every_rank import gather_from_ranks

from ...dispatch import _C
from ...dispatch.planning.functions.questions import refusal
from ...dispatch.plans import gradients
from ...dispatch.plans.shards import HookOff, attach, is_global, plain, rebox
from ...dispatch.running.moved_views import MovedView, refresh
from ...movement.differentiable import shard_of_plain
from ...movement.world import my_coordinate
from ...spec import B, TensorSpec
from ...spec.tracer import callbacks

_Base: Any = torch.Tensor
_WHY_SHAPE_IS_FIXED = "its shape is part of its spec, and other tensors may be views of it"

_ON_DATA = callbacks("on_data")


# -- data ------------------------------------------------------------------------------------------


def data(x: Any) -> Any:
    """Implement the getter of ``x.data``: an alias of ``x`` whose writes autograd does not see."""
    view = refresh(x)
    with HookOff():
        alias = attach(_Base.data.__get__(view), view._spec)
    x._data_was_read = True
    if x._moved_view:
        alias._moved_view = MovedView("detach", _Base.detach, ((x,), {}), None)
    for notify in _ON_DATA:
        notify(alias)
    return alias


def set_data(x: Any, value: Any) -> None:
    """Implement ``x.data = value``: ``x`` takes over the memory and the layout of ``value``.

    A plain ``value`` is distributed in the layout of ``x`` first. The gradient that ``x`` has is
    boxed to the new layout.

    Raises:
        RuntimeError: ``value`` is on another placement.
    """
    spec = x._spec
    if not is_global(value):
        target = TensorSpec.of(spec.placement, spec.sbp, value.shape, value.dtype)
        value = attach(shard_of_plain(value.detach(), target), target)
    elif value._spec.placement != spec.placement:
        raise RuntimeError(
            f"data: x is {spec}, and the new data is {value._spec}; graphs that hold x would find "
            "it on other ranks. Make a new tensor of the data, such as nn.Parameter(data), or give "
            "it on the same placement: x.data = data.to_global(placement=x.placement)."
        )
    grad = gradients.raw_grad(x)  # read before the take-over, so that it gets the old layout's spec
    take_over_memory(x, refresh(value))
    if grad is not None and grad._spec.shape == x._spec.shape:
        _box_in_place(grad, gradients.settled_spec(x).with_dtype(grad.dtype))
    _C.watch_if_leaf(x)  # again, since the layout decides how gradients are summed


def take_over_memory(x: Any, value: Any) -> None:
    """Give ``x`` the memory and the spec of the global tensor ``value``, but keep its ``.grad``.

    ``x`` remains the same object, so parameters of modules and optimizers can be changed in place.
    """
    local = plain(value)
    sizes = plain(x).shape
    with HookOff():
        if sizes != local.shape:
            # A graph that is still alive keeps the AccumulateGrad node of ``x``, which expects
            # gradients of the old shard's sizes. Torch makes a new node if the dtype changes, so
            # give ``x`` another dtype in between.
            other_dtype = torch.float32 if local.dtype is torch.float64 else torch.float64
            _Base.data.__set__(x, torch.empty(0, dtype=other_dtype, device=local.device))
        _Base.data.__set__(x, local)
    x._spec = value._spec
    x.__dict__.pop("_moved_view", None)


def _box_in_place(grad: Any, target: TensorSpec) -> None:
    """Box the gradient ``grad`` to the spec ``target``, without making a new tensor object."""
    if grad._spec is not target:
        with torch.no_grad():
            boxed = plain(rebox(grad.detach(), target, "gradient"))
        with HookOff():
            _Base.data.__set__(grad, boxed)
        grad._spec = target


def set_(self: Any, source: Any = None, *rest: Any, **named: Any) -> Any:
    """Implement ``x.set_(y)``: ``x`` takes over the memory and the spec of the global tensor ``y``.

    A storage as the source raises, since it describes no logical tensor.
    """
    if not is_global(source) or rest or named or source.dtype is not self.dtype:
        why = "what it is set to must be a global tensor of its dtype"
        refusal("set_", why, _SET_INSTEAD)(self)
    if torch.is_grad_enabled() and self.requires_grad:
        refusal("set_", "autograd cannot follow", "`with torch.no_grad():` around it")(self)
    set_data(self, source)
    torch.autograd.graph.increment_version(self)
    return self


_SET_INSTEAD = "x.copy_(y), or x.data = y with a tensor"


# -- the order in memory ---------------------------------------------------------------------------

_torch_contiguous = _C.Method(_Base.contiguous)
_shard_shape = _C.make_getter(_Base.shape)  # reads the shard's own shape


def contiguous(self: Any, memory_format: Any = torch.contiguous_format) -> Any:
    """Implement ``torch.Tensor.contiguous``.

    If a shard has one element along a dim, it is contiguous in more than one order of dims. Its
    strides are then set to those of the default order, which shows the order of the logical tensor.
    """
    if memory_format is not torch.contiguous_format:
        return _torch_contiguous(self, memory_format=memory_format)
    result = _torch_contiguous(self)
    shard_shape = _shard_shape(result)
    if (
        1 not in shard_shape
        or not is_global(result)
        or result._moved_view
        or shard_shape == result._spec.shape
    ):
        return result
    with HookOff():
        # A view of the same shape gets default strides.
        view = _Base.view(result, shard_shape)
        return result if _Base.stride(result) == view.stride() else attach(view, result._spec)


# -- other shapes ----------------------------------------------------------------------------------


def resize_(x: Any, *size: Any, memory_format: Any = None) -> Any:
    """Implement ``x.resize_(size)``: return ``x`` if it has this size already, else raise.

    A shape is part of a global tensor's spec, so it cannot be changed in place.
    """
    new_shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    if new_shape != x.shape:
        refusal("resize_", _WHY_SHAPE_IS_FIXED, "x.reshape(size), or x.new_empty(size)")(x)
    return x


def resize_as_(x: Any, other: Any, *, memory_format: Any = None) -> Any:
    """Implement ``x.resize_as_(other)``: return ``x`` if it has that shape, else raise.

    A shape is part of a global tensor's spec, so it cannot be changed in place.
    """
    if other.shape != x.shape:
        refusal("resize_as_", _WHY_SHAPE_IS_FIXED, "x.reshape_as(y), or torch.empty_like(y)")(x)
    return x


def as_strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Implement ``Tensor.as_strided`` on the logical tensor, in the memory order of one device.

    The result is a view if ``x`` is B, else a copy, which cannot be written.
    """
    source, broadcast = refresh(x), (B,) * x.placement.ndim
    if storage_offset is not None and (x._moved_view or x._is_view()):
        refusal("as_strided", "of a view, the offset is one in its base", "the base instead")(x)
    moves = source.sbp != broadcast
    whole = _whole_in_memory_order(source) if moves else plain(source)
    view: Any = whole.as_strided(size, stride, storage_offset)
    attach(view, TensorSpec.of(x.placement, broadcast, view.shape, view.dtype))
    if moves or x._moved_view:
        arguments = (x, size, stride, storage_offset)
        view._moved_view = MovedView("as_strided", as_strided, (arguments, {}), None)
    return view


def _whole_in_memory_order(x: Any) -> torch.Tensor:
    """Return the whole of ``x`` on this rank, its elements in the memory order of one device."""
    strides = _agreed_strides(x)
    in_memory_order = x.permute(sorted(range(x.ndim), key=lambda d: (-strides[d], d)))
    spec = in_memory_order._spec.with_sbp((B,) * x.placement.ndim)
    return plain(rebox(in_memory_order, spec, "as_strided")).contiguous()


def _agreed_strides(x: Any) -> tuple[int, ...]:
    """Return the strides of the logical tensor ``x``, the same on all ranks.

    They are those that the first rank of the placement sees, which holds the largest shard. Raises
    if the elements are not dense in memory, or if the shards do not show their order.
    """
    spec = x._spec
    strides = x.stride()
    if my_coordinate(spec.placement) is not None:
        strides = gather_from_ranks(strides, tuple(spec.placement.ranks.ravel().tolist()))[0]
    logical = torch.empty_strided(spec.shape, strides, device="meta")
    first_shape = spec.local_shape((0,) * spec.placement.ndim)
    # A dim along which the piece has one item does not show where it comes in the order.
    is_clear = all(
        n == 1 or local_size > 1 for n, local_size in zip(spec.shape, first_shape, strict=True)
    )
    is_dense = logical.permute(
        sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    ).is_contiguous()
    if not (logical.is_contiguous() or (is_dense and is_clear)):
        refusal("as_strided", "its shards do not say in which order its elements lie side by side",
                "x.contiguous() first")(x)  # fmt: skip
    return strides


# -- new -------------------------------------------------------------------------------------------


def new(x: Any, *args: Any, device: Any = None) -> Any:
    """Implement ``x.new(2, 3)`` and ``x.new(data)``: make a tensor like ``x`` of this size or data.

    If ``x`` is sparse, tensors in ``args`` are the entries of the new tensor.
    """
    if args and x.is_sparse and isinstance(args[0], torch.Tensor):
        return torch.sparse_coo_tensor(*args)
    if not args or all(isinstance(a, int) for a in args):
        return x.new_empty(args or 0)
    (size_or_data,) = args
    if isinstance(size_or_data, torch.Size):
        return x.new_empty(size_or_data)
    if isinstance(size_or_data, torch.Tensor | torch.UntypedStorage):
        refusal("new", "of a tensor or a storage it is an alias", "x.new_tensor(data)")(x)
    return x.new_tensor(size_or_data)
