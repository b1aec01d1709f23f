"""GlobalTensor: one logical tensor over many ranks, held on each as its local shard.

The object *is* the shard: a ``torch.Tensor`` subclass whose storage and autograd node are the
shard's own, with the spec as an attribute. What describes the tensor (``shape``, ``dtype``,
``numel()``, ...) answers for the logical one. Reading values (``item``, ``numpy``, ``print``,
``bool``) gives the logical value on every rank, and so is a collective: every rank must do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _tensor_str

from mirrored import mirrored_tensor
from mirrored.mirrored_tensor import MirroredTensor

from ..boxing import check
from ..boxing.differentiable import box, spread
from ..boxing.run import everywhere, here
from ..boxing.run import run as run_boxing
from ..spec import Placement, SbpLike, TensorSpec, resolve_sbp
from . import _C, autograd, dispatch, gradients, saving
from .create import check_world
from .planning import common_placement
from .shards import HookOff, adopt, attach, check_partial, device_of, plain, rebox
from .ties import fresh

_Base = torch.Tensor


def _answer(get: Callable[[Any], Any]) -> Any:
    """A property that answers for the logical tensor."""
    return property(get)


def _raw(name: str) -> Any:
    """A property of the shard itself, read and set past the hook."""
    descriptor = getattr(_Base, name)

    def set_(self: Any, value: Any) -> None:
        with HookOff():
            descriptor.__set__(self, value)

    return property(_C.make_getter(descriptor), set_)


class GlobalTensor(torch.Tensor):
    """One logical tensor with a placement and an SBP. Made by ``from_local``, ``distribute`` or
    ``zeros``, ``randn``, ..."""

    _spec: TensorSpec
    _watched = False
    _moved_view = False

    def __new__(cls, *args: Any, **kwargs: Any) -> GlobalTensor:
        raise TypeError(
            "GlobalTensor: it is not made by calling its class. Use consistent.from_local(shard, "
            "placement, sbp), "
            "consistent.distribute(tensor, placement, sbp), or a factory such as "
            "consistent.zeros(..., placement=, sbp=)."
        )

    # A builtin and no method: it is called with (func, types, args, kwargs), and no class before.
    __torch_function__: Any = dispatch.torch_function

    # -- what it is --------------------------------------------------------------------------------

    shape = _answer(lambda self: self._spec.shape)
    dtype = _answer(lambda self: self._spec.dtype)
    ndim = _answer(lambda self: self._spec.ndim)
    placement = _answer(lambda self: self._spec.placement)
    sbp = _answer(lambda self: self._spec.sbp)
    itemsize = _answer(lambda self: self._spec.dtype.itemsize)
    nbytes = _answer(lambda self: self._spec.nbytes)
    is_meta = _answer(lambda self: False)
    is_cuda = _answer(lambda self: self._spec.placement.type == "cuda")
    is_cpu = _answer(lambda self: self._spec.placement.type == "cpu")
    is_global = _answer(lambda self: True)

    is_leaf = _raw("is_leaf")
    grad_fn = _raw("grad_fn")
    layout = _raw("layout")
    is_sparse = _raw("is_sparse")
    is_quantized = _raw("is_quantized")
    is_nested = _raw("is_nested")
    is_mkldnn = _raw("is_mkldnn")
    retains_grad = _raw("retains_grad")
    output_nr = _raw("output_nr")
    _version = _raw("_version")
    _backward_hooks = _raw("_backward_hooks")
    _post_accumulate_grad_hooks = _raw("_post_accumulate_grad_hooks")
    _base = _raw("_base")
    name = _raw("name")

    @property
    def device(self) -> torch.device:
        """Device of this rank's shard; outside the placement, the one that plain tensors would
        be made on."""
        placement = self._spec.placement
        if placement.type == "cpu" or here(placement) is None:
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
        """Strides that the logical tensor has on one device, in the shard's order of dims."""
        with HookOff():
            local = _Base.stride(self)
        order = sorted(range(self.ndim), key=lambda d: (-local[d], d))
        strides, step = [0] * self.ndim, 1
        for d in reversed(order):
            strides[d] = 0 if local[d] == 0 and self.shape[d] > 1 else step
            step *= max(self.shape[d], 1) if local[d] != 0 else 1
        return tuple(strides) if dim is None else strides[dim]

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

    @property
    def T(self) -> Any:  # noqa: N802  (torch's name)
        """All dims reversed."""
        return self.permute(tuple(range(self.ndim - 1, -1, -1)))

    @property
    def mT(self) -> Any:  # noqa: N802
        """The last two dims swapped."""
        return self.transpose(-2, -1)

    @property
    def H(self) -> Any:  # noqa: N802
        """Conjugate transpose."""
        return self.adjoint() if self.ndim else self

    @property
    def mH(self) -> Any:  # noqa: N802
        """Conjugate transpose of the last two dims."""
        return self.adjoint()

    @property
    def real(self) -> Any:
        """Real part."""
        return torch.real(self) if self.is_complex() else self

    @property
    def imag(self) -> Any:
        """Imaginary part."""
        return torch.imag(self)

    # -- moving ------------------------------------------------------------------------------------

    def to_global(
        self,
        placement: Placement | None = None,
        sbp: SbpLike | None = None,
        *,
        grad_sbp: SbpLike | None = None,
    ) -> GlobalTensor:
        """The same logical tensor on another placement, under another SBP; what is left out is
        kept.

        Every rank of the world calls it. Ranks outside a placement hold a ``meta`` shard of the
        tensor there, so they know its shape and keep the same autograd graph. Differentiable, as
        often as wanted.

        ``grad_sbp``: in backward the gradient is first boxed to this SBP on the target, which says
        where a reduction happens.
        """
        spec = self._spec
        where = spec.placement if placement is None else placement
        if where != spec.placement:
            check_world("to_global", where)
        entries = resolve_sbp(spec.sbp if sbp is None else sbp, where, spec.shape)
        target = TensorSpec.of(where, entries, spec.shape, spec.dtype)
        wanted = None if grad_sbp is None else resolve_sbp(grad_sbp, where, spec.shape)
        if target is spec and wanted is None:
            return self
        check_partial("to_global", target)
        check.calling("to_global")
        x = fresh(self)
        out = box(x, spec, target, wanted)
        return attach(plain(out) if out is x else out, target)

    def to_local(self) -> torch.Tensor:
        """This rank's shard as a plain tensor that shares its storage; empty on a rank outside the
        placement.

        Differentiable: the gradient that flows back is taken as this rank's shard in the dual SBP,
        so that of a B tensor counts as an addend.
        """
        if here(self._spec.placement) is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return plain(fresh(self))

    def to_mirrored(self) -> MirroredTensor:
        """The pieces as a list with one element a device, in the placement's order of ranks; shares
        storage.

        The way back is ``mirrored.to_global(sbp, placement=...)`` with the SBP that this tensor
        has. Differentiable like ``to_local``. Pieces of a dim that does not split evenly differ in
        shape.
        """
        ranks = self._spec.placement.ranks.ravel().tolist()
        return mirrored_tensor.from_local(plain(fresh(self)), ranks)

    def full(self) -> torch.Tensor:
        """The whole logical value as a plain tensor on every rank of the world, without
        autograd. A collective."""
        check.calling("full")
        with torch.no_grad():
            return run_boxing(plain(self.detach()), self._spec, everywhere(self._spec))

    def type_as(self, other: torch.Tensor) -> Any:
        """This tensor in the dtype of ``other``."""
        return self.to(other.dtype)

    # -- reading values ----------------------------------------------------------------------------

    def item(self) -> Any:
        """The one logical element, on every rank."""
        if self.numel() != 1:
            raise RuntimeError(
                f"item: x is {self._spec} with {self.numel()} elements, and only a tensor with "
                "one element is a "
                "Python number. Index or reduce it first, or use x.tolist()."
            )
        return self.full().item()

    def tolist(self) -> Any:
        """The logical value as nested lists."""
        return self.full().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The logical value as a numpy array, on every rank."""
        if self.requires_grad and not force:
            raise RuntimeError(
                f"numpy: x is {self._spec} and requires grad, and numpy records none. Use "
                "x.detach().numpy()."
            )
        return self.full().numpy(force=force)

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __nonzero__, __long__ = __bool__, __int__  # torch's names for the same, which look like ops

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return self.full().__index__()

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.ndim == 0 else str(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shown = self.sbp[0] if len(self.sbp) == 1 else self.sbp
        value = _tensor_str._str(self.full())
        tail = f", placement={self.placement}, sbp={shown}"
        node = self.grad_fn
        if node is not None:
            # Ranks outside the placement hold an alias of what the op returned, see ``follow``.
            if here(self._spec.placement) is None and type(node).__name__ == "AliasBackward0":
                node = node.next_functions[0][0]
            tail += f", grad_fn=<{type(node).__name__}>"
        elif self.requires_grad:
            tail += ", requires_grad=True"
        return f"{value[:-1]}{tail})"

    def __contains__(self, element: Any) -> bool:
        return bool((element == self).any().item())

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
        if requires_grad and self.is_leaf:
            autograd.watch_leaf(self)
        return self

    def _set_grad(self, value: Any) -> None:
        if value is not None:
            given = adopt(value, self._spec.placement, "grad")
            common_placement("grad", (self, given))
            if given._spec.sbp != self._spec.sbp:
                given = rebox(given.detach(), self._spec.with_dtype(given.dtype), "grad")
            elif given is not value:
                given = given.clone()
            value = given
        gradients.set_raw_grad(self, value)

    def _delete_grad(self) -> None:
        gradients.set_raw_grad(self, None)

    # The gradient as a global tensor: as this leaf lies (B where it is P) once backward ended, P
    # inside ``no_sync()``. Read without a step in Python: optimizers do so for each parameter.
    grad: Any = property(gradients.raw_grad, _set_grad, _delete_grad)

    @property
    def data(self) -> Any:
        """The same data without autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, GlobalTensor):
            spec = self._spec
            target = TensorSpec.of(spec.placement, spec.sbp, value.shape, value.dtype)
            value = attach(spread(value.detach(), target), target)
        gradients.raw_grad(self)  # typed now: it lies as this tensor did
        with HookOff():
            _Base.data.__set__(self, value)  # type: ignore[attr-defined]
        self._spec = value._spec
        if self.requires_grad and self.is_leaf:
            autograd.watch_leaf(self)

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Gradients of the leaves, each boxed to the leaf's own SBP when this returns."""
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call ``hook`` with this tensor's gradient as a global tensor (in the dual SBP); it may
        return another."""
        spec = self._spec

        def wrapped(grad: torch.Tensor) -> torch.Tensor | None:
            dual = spec.dual.with_dtype(grad.dtype)
            result = hook(attach(grad.view_as(grad), dual))
            if result is None:
                return None
            given = adopt(result, spec.placement, "hook")
            return plain(given if given._spec is dual else rebox(given, dual, "hook"))

        with HookOff():
            return _Base.register_hook(self, wrapped)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call ``hook(leaf)`` after a gradient was added to this leaf."""
        with HookOff():
            return _Base.register_post_accumulate_grad_hook(self, hook)

    def retain_grad(self) -> None:
        """Keep the gradient of this non-leaf in ``.grad`` (in the dual SBP)."""
        with HookOff():
            _Base.retain_grad(self)

    # -- copies ------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> Any:
        return saving.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return saving.reduce(self)

    def is_shared(self) -> bool:
        """Whether the shard lies in shared memory."""
        return plain(self).is_shared()


dispatch.set_class(GlobalTensor)
dispatch.enter_methods(GlobalTensor)
