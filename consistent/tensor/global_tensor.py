"""GlobalTensor: one logical tensor over many ranks, held on each as its local shard.

The object *is* the shard: a ``torch.Tensor`` subclass whose storage and autograd node are the
shard's own, with the spec as an attribute. What describes the tensor (``shape``, ``dtype``,
``numel()``, ...) answers for the logical one. Reading values (``item``, ``numpy``, ``bool``) gives
the logical value on every rank, and so is a collective: every rank must do it. Beside that only
ops and ``to_global`` communicate: no question does (``inspection/``), nor does ``print``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from ..autograd import backward
from ..dispatch import _C, hook
from ..dispatch.plans import gradients
from ..dispatch.plans.shards import HookOff, attach, plain, rebox, take_in
from ..movement.world import device_of, my_coordinate
from ..spec import NdSbp, Placement, TensorSpec
from .inspection import printing, reading
from .inspection.strides import logical_strides
from .storage import in_checkpoints, memory, moving, saving, views

_Base = torch.Tensor


def _answer(get: Callable[[Any], Any]) -> Any:
    """A property that answers for the logical tensor. Models ask for the spec's in every layer, so
    their ``get`` is no Python function."""
    return property(get)


def _raw(name: str) -> Any:
    """A property of the shard itself, read and set past the hook."""
    descriptor = getattr(_Base, name)

    def set_(self: Any, value: Any) -> None:
        with HookOff():
            descriptor.__set__(self, value)

    return property(_C.make_getter(descriptor), set_)


def _hooks(name: str) -> Any:
    """Users' hooks; the library's own hook stays the last one."""
    raw = _raw(name)

    def set_(self: Any, value: Any) -> None:
        raw.fset(self, value)
        _C.watch_if_leaf(self)  # torch sets this under a lock of the node: nothing else is asked

    return property(raw.fget, set_)


class GlobalTensor(torch.Tensor):
    """One logical tensor with a placement and an SBP. Made by ``from_local``, ``distribute`` or
    ``zeros``, ``randn``, ..."""

    _spec: TensorSpec
    _moved_view = False
    _data_given = False  # x.data was asked for: torch counts no writes into it as writes into x

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

    shape = _answer(attrgetter("_spec.shape"))
    dtype = _answer(attrgetter("_spec.dtype"))
    ndim = _answer(attrgetter("_spec.ndim"))
    placement: Placement = _answer(attrgetter("_spec.placement"))
    sbp: NdSbp = _answer(moving.sbp_of)
    itemsize = _answer(attrgetter("_spec.dtype.itemsize"))
    nbytes = _answer(attrgetter("_spec.nbytes"))
    is_meta = _answer(lambda self: False)
    is_cuda = _answer(lambda self: self._spec.placement.type == "cuda")
    is_cpu = _answer(lambda self: self._spec.placement.type == "cpu")
    is_global: bool = _answer(lambda self: True)

    is_leaf = _raw("is_leaf")
    grad_fn = _raw("grad_fn")
    layout = _raw("layout")
    is_sparse = _raw("is_sparse")  # optimizers ask it of each gradient in each step
    _version = _raw("_version")
    _backward_hooks = _hooks("_backward_hooks")
    _post_accumulate_grad_hooks = _raw("_post_accumulate_grad_hooks")

    @property
    def device(self) -> torch.device:
        """Device of this rank's shard; outside the placement, the one that plain tensors would
        be made on."""
        placement = self._spec.placement
        if placement.type == "cpu" or my_coordinate(placement) is None:
            return device_of(placement)
        with HookOff():
            return _Base.device.__get__(self)  # type: ignore[attr-defined]

    def size(self, dim: int | None = None) -> Any:
        """Logical size, or that of one dim."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        """Number of dims."""
        return self._spec.ndim

    ndimension = dim

    def numel(self) -> int:
        """Number of logical elements."""
        return self._spec.numel

    nelement = numel

    def element_size(self) -> int:
        """Bytes of one element."""
        return self._spec.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Strides that the logical tensor has on one device, laid out as the shards are."""
        strides = logical_strides(self)
        return strides if dim is None else strides[dim]

    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating one."""
        return self._spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the dtype is a complex one."""
        return self._spec.dtype.is_complex

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    T = _answer(views.all_reversed)
    mT = _answer(views.last_two_swapped)
    H = _answer(views.conjugate_transpose)
    mH = _answer(views.conjugate_transpose)
    real = _answer(views.real_part)
    imag = _answer(views.imaginary_part)

    # -- moving ------------------------------------------------------------------------------------

    to_global = moving.to_global
    to_local = moving.to_local
    to_mirrored = moving.to_mirrored

    def type_as(self, other: torch.Tensor) -> Any:
        """This tensor in the dtype of ``other``."""
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
        return printing.formatted(self, format_spec)

    # -- autograd ----------------------------------------------------------------------------------

    def _set_requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    # Whether autograd records ops on this tensor.
    requires_grad: Any = property(_C.make_getter(_Base.requires_grad), _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> GlobalTensor:
        """Ask for gradients of this leaf; they are boxed to its own SBP."""
        if requires_grad:
            _ = self._spec.dual  # where the gradient will lie; P(max) and P(min) raise
        with HookOff():
            _Base.requires_grad_(self, requires_grad)
        _C.watch_if_leaf(self)
        return self

    def _delete_grad(self) -> None:
        self.grad = None

    # The gradient as a global tensor: in this leaf's layout (B where it is P) once backward has
    # ended, P inside ``no_sync()``. Read without a step in Python: optimizers do so for each
    # parameter.
    grad: Any = property(gradients.raw_grad, _C.assign_gradient, _delete_grad)

    data: Any = property(memory.data, memory.set_data)
    set_ = memory.set_  # torch does not ask for hooks in it
    contiguous = memory.contiguous

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Gradients of the leaves, each boxed to the leaf's own SBP when this returns."""
        if inputs is None:
            backward.backward(self, gradient, retain_graph, create_graph)
            return
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call ``hook`` with this tensor's gradient as a global tensor (in the dual SBP); it may
        return another."""
        wrapped = self._on_shards(hook)
        with HookOff():
            return _Base.register_hook(self, wrapped)

    def _on_shards(self, hook: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
        """``hook`` as torch calls it, with the shard of a gradient."""
        spec = self._spec

        def wrapped(grad: torch.Tensor) -> torch.Tensor | None:
            dual = spec.dual.with_dtype(grad.dtype)
            result = hook(attach(grad.view_as(grad), dual))
            if result is None:
                return None
            given = take_in(result, spec.placement, "hook")
            return plain(given if given._spec is dual else rebox(given, dual, "hook"))

        return wrapped

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call ``hook(leaf)`` after a gradient was added to this leaf."""
        with HookOff():
            return _Base.register_post_accumulate_grad_hook(self, hook)

    def retain_grad(self) -> None:
        """Keep the gradient of this non-leaf in ``.grad`` (in the dual SBP)."""
        with HookOff():
            _Base.retain_grad(self)

    # -- copies ------------------------------------------------------------------------------------

    # Torch's own: a plain parameter that becomes global is still found where it is a key.
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


hook.set_class(GlobalTensor)
hook.enter_methods(GlobalTensor)
