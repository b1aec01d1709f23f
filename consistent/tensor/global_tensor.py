"""``GlobalTensor``: one logical tensor over many ranks, of which each rank holds its local shard.

The object *is* the shard: a ``torch.Tensor`` subclass whose storage and autograd node are the
shard's own, with the spec as an attribute. Attributes and methods that describe the tensor
(``shape``, ``dtype``, ``numel()``, ...) describe the logical tensor. Reading values (``item``,
``numpy``, ``bool``) returns the logical value on every rank, and so is a collective: every rank
must do it. Other than that only ops and ``to_global`` communicate. Queries (``inspection/``) and
``print`` never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from ..autograd import backward
from ..dispatch import _C, hook
from ..dispatch.plans import gradients
from ..dispatch.plans.shards import HookOff, attach, compare_and_adopt, plain, rebox, set_class
from ..movement.world import device_of, my_coordinate
from ..spec import NdSbp, Placement, TensorSpec
from .inspection import printing, reading
from .inspection.strides import logical_strides
from .storage import in_checkpoints, memory, moving, saving, views

_Base = torch.Tensor


def _logical_property(get: Callable[[Any], Any]) -> Any:
    """Return a property of ``GlobalTensor`` that describes the logical tensor, such as its shape.

    ``get`` computes it from the tensor. Where it only reads the spec, an ``attrgetter`` is given,
    which is faster than a Python function: models read these in every layer.
    """
    return property(get)


def _shard_property(name: str) -> Any:
    """Return a property of ``GlobalTensor`` that is the attribute ``name`` of this rank's shard.

    It reads and sets the attribute as ``torch.Tensor`` does, without ``__torch_function__``.
    """
    descriptor = getattr(_Base, name)

    def set_(self: Any, value: Any) -> None:
        with HookOff():
            descriptor.__set__(self, value)

    return property(_C.make_getter(descriptor), set_)


def _hooks_property(name: str) -> Any:
    """Return a property for the attribute ``name``, which holds the user's hooks on a tensor.

    After each change of it the library's own hook, which sums gradients over ranks, is registered
    again, so that it runs after the user's hooks.
    """
    raw = _shard_property(name)

    def set_(self: Any, value: Any) -> None:
        raw.fset(self, value)
        # Torch sets this attribute under a lock of the autograd node, so no other node may be used.
        _C.watch_if_leaf(self)

    return property(raw.fget, set_)


class GlobalTensor(torch.Tensor):
    """One logical tensor that is distributed over the ranks of a placement (a device mesh).

    Its SBP says for each axis of the placement whether the tensor is sharded (S), replicated (B) or
    a partial sum (P). Each rank holds its local shard. Make one with ``from_local``, ``distribute``
    or a factory such as ``zeros`` or ``randn``.
    """

    _spec: TensorSpec
    _moved_view = False
    _data_was_read = False  # x.data was read: torch does not count writes into it as writes into x

    def __new__(cls, *args: Any, **kwargs: Any) -> GlobalTensor:
        raise TypeError(
            "GlobalTensor: it is not made by calling its class. Use consistent.from_local(shard, "
            "placement, sbp), "
            "consistent.distribute(tensor, placement, sbp), or a factory such as "
            "consistent.zeros(..., placement=, sbp=)."
        )

    # A builtin, not a method: it is called with (func, types, args, kwargs), without the class.
    __torch_function__: Any = hook.torch_function

    # -- what it is --------------------------------------------------------------------------------

    shape = _logical_property(attrgetter("_spec.shape"))
    dtype = _logical_property(attrgetter("_spec.dtype"))
    ndim = _logical_property(attrgetter("_spec.ndim"))
    placement: Placement = _logical_property(attrgetter("_spec.placement"))
    sbp: NdSbp = _logical_property(moving.sbp_of)
    itemsize = _logical_property(attrgetter("_spec.dtype.itemsize"))
    nbytes = _logical_property(attrgetter("_spec.nbytes"))
    # False also outside the placement, where the shard is meta: this is about the logical tensor.
    is_meta = _logical_property(lambda self: False)
    is_cuda = _logical_property(lambda self: self._spec.placement.type == "cuda")
    is_cpu = _logical_property(lambda self: self._spec.placement.type == "cpu")
    is_global: bool = _logical_property(lambda self: True)

    is_leaf = _shard_property("is_leaf")
    grad_fn = _shard_property("grad_fn")
    layout = _shard_property("layout")
    is_sparse = _shard_property("is_sparse")  # optimizers read it for each gradient in each step
    _version = _shard_property("_version")
    _backward_hooks = _hooks_property("_backward_hooks")
    _post_accumulate_grad_hooks = _shard_property("_post_accumulate_grad_hooks")

    @property
    def device(self) -> torch.device:
        """Device of this rank's shard; outside the placement, the device for new plain tensors.

        It is a real device on every rank, so ``torch.zeros(3, device=x.device)`` works on all of
        them.
        """
        placement = self._spec.placement
        if placement.type == "cpu" or my_coordinate(placement) is None:
            return device_of(placement)
        with HookOff():
            return _Base.device.__get__(self)  # type: ignore[attr-defined]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the logical tensor, or its size along dim ``dim``."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        """Return the number of dims of the logical tensor."""
        return self._spec.ndim

    ndimension = dim

    def numel(self) -> int:
        """Return the number of elements of the logical tensor."""
        return self._spec.numel

    nelement = numel

    def element_size(self) -> int:
        """Return the number of bytes of one element."""
        return self._spec.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides that the logical tensor would have on one device.

        They have the order of dims that the shards have in memory.
        """
        strides = logical_strides(self)
        return strides if dim is None else strides[dim]

    def is_floating_point(self) -> bool:
        """Return whether the dtype is a floating-point one."""
        return self._spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Return whether the dtype is a complex one."""
        return self._spec.dtype.is_complex

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    T = _logical_property(views.all_reversed)
    mT = _logical_property(views.last_two_swapped)
    H = _logical_property(views.conjugate_transpose)
    mH = _logical_property(views.conjugate_transpose)
    real = _logical_property(views.real_part)
    imag = _logical_property(views.imaginary_part)

    # -- moving ------------------------------------------------------------------------------------

    to_global = moving.to_global
    to_local = moving.to_local
    to_mirrored = moving.to_mirrored

    def type_as(self, other: torch.Tensor) -> Any:
        """Return this tensor converted to the dtype of ``other``."""
        return self.to(other.dtype)

    # -- reading values: collectives ---------------------------------------------------------------

    full = reading.full
    item = reading.item
    tolist = reading.tolist
    numpy = reading.numpy
    __array__ = reading.array
    __bool__ = __nonzero__ = reading.truth  # type: ignore[assignment]  (torch's names for both)
    __int__ = __long__ = reading.as_int
    __float__ = reading.as_float
    __complex__ = reading.as_complex
    __index__ = reading.index
    __contains__ = reading.contains  # type: ignore[assignment]

    # -- text: nothing is sent for it --------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return printing.text_of(self)

    def __format__(self, format_spec: str) -> str:
        return printing.format_value(self, format_spec)

    # -- autograd ----------------------------------------------------------------------------------

    def _set_requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    # Whether autograd records ops on this tensor.
    requires_grad: Any = property(_C.make_getter(_Base.requires_grad), _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> GlobalTensor:
        """Set whether autograd computes a gradient for this leaf.

        After backward the gradient has the leaf's own layout. P(max) and P(min) have none, and
        raise.
        """
        if requires_grad:
            _ = self._spec.dual  # spec of the gradient: raises for P(max) and P(min)
        with HookOff():
            _Base.requires_grad_(self, requires_grad)
        _C.watch_if_leaf(self)
        return self

    def _delete_grad(self) -> None:
        self.grad = None

    # The gradient as a global tensor. After backward it has this leaf's layout (B where the leaf is
    # P); inside ``no_sync()`` it is P. The getter is in C++, because optimizers read the gradient
    # of each parameter.
    grad: Any = property(gradients.raw_grad, _C.assign_gradient, _delete_grad)

    data: Any = property(memory.data, memory.set_data)
    set_ = memory.set_  # torch's own does not call __torch_function__
    contiguous = memory.contiguous

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Compute the gradients of the leaves and add them to their ``.grad``.

        On return each gradient has the layout of its leaf. The arguments are those of
        ``torch.Tensor.backward``.
        """
        if inputs is None:
            backward.backward(self, gradient, retain_graph, create_graph)
            return
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Register ``hook`` to be called in backward with this tensor's gradient, a global tensor.

        The gradient has the dual SBP (S where the tensor is sharded, P where it is replicated, B
        where it is a partial sum). The hook may return another gradient, which replaces it.
        """
        wrapped = self._hook_for_shards(hook)
        with HookOff():
            return _Base.register_hook(self, wrapped)

    def _hook_for_shards(self, hook: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
        """Wrap ``hook``, which takes a global gradient, so that torch can call it with a shard."""
        spec = self._spec

        def wrapped(grad: torch.Tensor) -> torch.Tensor | None:
            dual = spec.dual.with_dtype(grad.dtype)
            # A view, because `attach` changes the class of its argument, which the engine still
            # uses.
            result = hook(attach(grad.view_as(grad), dual))
            if result is None:
                return None
            global_grad = compare_and_adopt(result, spec.placement, "hook")
            return plain(
                global_grad if global_grad._spec is dual else rebox(global_grad, dual, "hook")
            )

        return wrapped

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Register ``hook``, called as ``hook(leaf)`` after each addition to ``leaf.grad``."""
        with HookOff():
            return _Base.register_post_accumulate_grad_hook(self, hook)

    def retain_grad(self) -> None:
        """Keep the gradient of this tensor, which is not a leaf, in ``.grad`` after backward.

        It has the dual SBP: P where the tensor is replicated, B where it is a partial sum.
        """
        with HookOff():
            _Base.retain_grad(self)

    # -- copies ------------------------------------------------------------------------------------

    # Torch's own hash, by identity: a plain parameter that becomes global in place stays valid as a
    # dict key, as in an optimizer's state.
    __hash__ = _Base.__hash__

    def __copy__(self) -> Any:
        return saving.shallow_copy(self)

    def __deepcopy__(self, memo: dict) -> Any:
        return saving.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any = None) -> tuple:
        return saving.reduce(self)

    __reduce__ = __reduce_ex__

    # -- torch.distributed.checkpoint --------------------------------------------------------------

    __create_write_items__ = in_checkpoints.write_items
    __create_chunk_list__ = in_checkpoints.chunk_list
    __get_tensor_shard__ = in_checkpoints.tensor_shard


set_class(GlobalTensor)
hook.set_up(GlobalTensor)
# Once the class is complete, since methods that it defines itself are left alone.
hook.enter_methods(GlobalTensor)
