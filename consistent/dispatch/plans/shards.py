"""Conversion between shards and global tensors: retyping and boxing shards, adopting plain tensors.

A global tensor is its local shard with another Python class and a spec.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrored.mirrored_tensor import MirroredTensor

from ...movement import check_mode, plain_values
from ...movement.boxed import Arriving, box, box_several
from ...movement.coded import Coders, gather_each
from ...movement.differentiable import shard_of_plain
from ...movement.grad_mode import records
from ...movement.world import my_coordinate, whole_on_world
from ...spec import B, Placement, TensorSpec, invalid_dtype_reason
from ...spec.nested import map_tensors
from ...spec.tracer import callbacks
from .. import _C

HookOff = torch._C.DisableTorchFunctionSubclass
_Tensor = torch.Tensor
_ON_ADOPT = callbacks("on_adopt")

# GlobalTensor. Its module imports this one, so it registers the class here instead.
_global_class: Any = None


def set_class(cls: Any) -> None:
    """Set the class of global tensors, ``GlobalTensor``; called by the module that defines it."""
    global _global_class
    _global_class = cls


def is_global(x: Any) -> bool:
    """Return whether ``x`` is a global tensor: one of class ``GlobalTensor``."""
    return x.__class__ is _global_class


def common_placement(name: str, tensors: Sequence[Any]) -> Placement:
    """Return the placement that all global tensors among ``tensors`` share.

    There must be at least one. ``name`` is the op's, for the message.

    Raises:
        RuntimeError: the tensors are on different placements.
    """
    first = None
    for t in tensors:
        if is_global(t):
            if first is None:
                first = t
            elif t._spec.placement != first._spec.placement:
                raise RuntimeError(
                    f"{name}: its tensors are on different placements, and boxing does not move "
                    "tensors between "
                    f"placements by itself.\n  One is {first._spec}, another is {t._spec}.\n"
                    "  Move one of them first: x.to_global(placement=y.placement)."
                )
    assert first is not None
    return first._spec.placement


# (local, spec) -> local, retyped in place as the shard of a global tensor. Nothing else may refer
# to ``local``, since its class changes.
attach = _C.attach


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return the shard of the global tensor ``x`` as a plain tensor.

    It shares memory with ``x``, and gradients flow through it. Of a sparse ``x`` that requires grad
    it is a copy.
    """
    with HookOff():
        try:
            return _Tensor.as_subclass(x, _Tensor)  # type: ignore[arg-type]
        except RuntimeError:  # sparse tensors have no storage or no strides to alias
            if x.layout is torch.strided:
                raise
            return x.clone() if x.requires_grad else x.detach()


def replace_shard(x: Any, local: torch.Tensor, spec: TensorSpec) -> None:
    """Give the object ``x`` another shard and spec.

    Used where a tensor must stay the same object, as a ``.grad`` whose layout changes when it is
    summed over ranks. Tensors that shared memory with ``x`` keep the old data.
    """
    with HookOff():
        _Tensor.data.__set__(x, local)  # type: ignore[attr-defined]
        # Setting `data` leaves the version counter as it is, so a backward that has saved ``x``
        # would not notice the change.
        torch.autograd.graph.increment_version(x)
    attach(x, spec)


def whole_on_all_ranks(x: Any) -> torch.Tensor:
    """Return ``x`` as a plain tensor, whole on every rank of the world."""
    return plain(box(x, x._spec, whole_on_world(x._spec))) if is_global(x) else x


def rebox(x: Any, target: TensorSpec, what: str = "to_global") -> Any:
    """Box the global tensor ``x`` to the spec ``target``; differentiable.

    ``what`` is the name of the op that needs it, which check mode reports.
    """
    check_mode.set_current_op(what)
    return attach(box(x, x._spec, target), target)


def rebox_several(
    xs: Sequence[Any],
    targets: Sequence[TensorSpec],
    what: str,
    *,
    arrived: Sequence[torch.Tensor] | None = None,
    arriving: Arriving | None = None,
    coders: Coders = (),
) -> list[Any]:
    """Box several global tensors, ``xs`` to ``targets``, in as few messages as possible.

    Args:
        xs, targets: the tensors, and the specs to box them to, which differ from theirs.
        what: name of the op that needs it, for check mode.
        arrived, arriving, coders: as in ``box_several``.
    """
    check_mode.set_current_op(what)
    routes = [(x._spec, target) for x, target in zip(xs, targets, strict=True)]
    if torch.is_inference_mode_enabled():  # tensors made there have no version counter
        with torch.inference_mode(False), torch.no_grad(), HookOff():
            shards = arrived or gather_each([_Tensor.detach(x) for x in xs], routes, coders)
    else:
        shards = box_several(xs, routes, arrived, arriving, coders)
    return [attach(x, target) for x, target in zip(shards, targets, strict=True)]


def adopt(x: torch.Tensor, placement: Placement, what: str) -> Any:
    """Turn a plain tensor that is equal on every rank into a B global tensor, for op ``what``.

    This is how plain operands enter a call with global ones. In backward the plain tensor gets the
    whole gradient on every rank. A global ``x`` is returned as it is. The values are compared
    between ranks in check mode only; ``compare_and_adopt`` compares them, too.
    """
    if x.__class__ is _global_class:
        return x
    refuse_other_views(x, what)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        # No TypeError: Python's operators would replace its message with their own.
        raise RuntimeError(
            f"{what}: a global tensor on {placement} meets a tensor that a torch.func or vmap "
            "transform follows, and the "
            "transform would see this rank's shard only. Use torch.autograd.grad, which works on "
            "global tensors, or x.full()."
        )
    spec = TensorSpec.of(placement, (B,) * placement.ndim, x.shape, x.dtype)
    if check_mode.enabled:
        check_mode.check_equal(x, placement, f"a plain tensor given to {what}")
    # `shard_of_plain` makes the meta shard of a rank outside the placement, and records the
    # autograd node by which ``x`` gets its gradient.
    needs_shard = my_coordinate(placement) is None or records((x,))
    adopted = attach(shard_of_plain(x, spec) if needs_shard else x.detach(), spec)
    for notify in _ON_ADOPT:
        notify(x, adopted)
    return adopted


def compare_and_adopt(x: torch.Tensor, placement: Placement, what: str) -> Any:
    """Turn a plain tensor into a B global tensor, in calls for which no plan is made.

    Does what ``adopt`` does, after it has compared the values between ranks for the first tensors
    that ``what`` receives.
    """
    compare(x, placement, what)
    return adopt(x, placement, what)


def compare(x: torch.Tensor, placement: Placement, what: str) -> None:
    """Compare the plain tensor ``x`` between the ranks of ``placement``.

    Only the first times that ``what``, the name of a call, gets a tensor of this dtype and number
    of dims. If the values differ, every rank raises. Nothing is done for a global ``x``.
    """
    if x.__class__ is not _global_class:
        plain_values.compare_plain(what, [x], placement, (what, x.dtype, x.ndim))


def refuse_other_views(x: Any, what: str) -> None:
    """Raise if ``x``, an operand next to global tensors, is a mirrored tensor or a DTensor.

    ``what`` is the name of the op.
    """
    if x.__class__ is MirroredTensor:
        # No TypeError: Python's operators would replace its message with their own.
        raise RuntimeError(
            f"{what}: a mirrored tensor meets a global one. The mirrored one is a list with one "
            "element a device, over ranks "
            f"{x.ranks}, here of shape {tuple(x.shape)}; nothing says how the elements make up "
            "one logical tensor.\n"
            "  Say it with mirrored.to_global(sbp) (split(0) joins them), or use the global "
            "tensor's pieces: x.to_mirrored()."
        )
    # Until the module is imported no DTensor can exist, so it need not be imported here.
    module = sys.modules.get("torch.distributed.tensor")
    # While another thread imports the module, it may lack the class.
    if module is not None and isinstance(x, getattr(module, "DTensor", ())):
        raise RuntimeError(
            f"{what}: a DTensor is given, {tuple(x.placements)} on {x.device_mesh}, and of the "
            "two kinds neither knows the other. Convert it first: "
            "consistent.checkpoint.from_dtensor(x)."
        )


def promote(x: torch.Tensor, placement: Placement, what: str) -> Any:
    """Turn the plain target of an in-place op into a B tensor when its other operand is global.

    For ``x.add_(y)`` with a plain ``x`` and a global ``y``: the object ``x`` stays the same and
    becomes global. ``what`` is the op's name.

    Raises:
        RuntimeError: the plain tensor requires grad.
    """
    if x.requires_grad:
        raise RuntimeError(
            f"{what}_: a global tensor is written in place into a plain tensor of shape "
            f"{tuple(x.shape)} that requires "
            "grad, and its history is not global. Make it global first: consistent.distribute(x, "
            "placement, sbp.broadcast)."
        )
    if check_mode.enabled:
        check_mode.check_equal(x, placement, f"the plain tensor that {what}_ writes into")
    spec = TensorSpec.of(placement, (B,) * placement.ndim, x.shape, x.dtype)
    if my_coordinate(placement) is None:
        # A rank outside the placement holds a meta shard.
        x.data = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return attach(x, spec)


def retype(out: Any, outs: tuple[TensorSpec, ...]) -> Any:
    """Turn the plain tensors in ``out``, the result of an op on shards, into global tensors.

    They get the specs ``outs``, in order, with the dtypes that the op has given.
    """
    if out.__class__ is _Tensor:  # fast path: most ops return one tensor
        spec = outs[0]
        return attach(out, spec if out.dtype is spec.dtype else spec.with_dtype(out.dtype))

    def spec_of(position: int, x: torch.Tensor) -> TensorSpec:
        spec = outs[position]
        return spec if x.dtype is spec.dtype else spec.with_dtype(x.dtype)

    return attach_each(out, spec_of)[0]


def whole_result(out: Any, placement: Placement) -> tuple[Any, tuple[TensorSpec, ...]]:
    """Turn the results of an op that every rank ran on whole inputs into B tensors.

    Returns (``out`` with these, their specs). The shapes are those of the tensors, so they may
    depend on data.
    """
    everywhere = (B,) * placement.ndim

    def spec_of(_: int, x: torch.Tensor) -> TensorSpec:
        return TensorSpec.of(placement, everywhere, plain(x).shape, x.dtype)

    out, specs = attach_each(out, spec_of)
    return out, tuple(specs)


def attach_each(
    out: Any, spec_of: Callable[[int, torch.Tensor], TensorSpec]
) -> tuple[Any, list[TensorSpec]]:
    """Attach ``spec_of(position, tensor)`` to each tensor in ``out``; return (result, new specs).

    An op may return an operand itself. If it does so on the logical tensor, as ``contiguous`` may,
    the operand is the result. If it does so only because the shard leaves nothing to do, as when
    one row is expanded to the one row of this rank, the operand keeps its spec, and the result is
    an alias.
    """
    specs: list[TensorSpec] = []
    position = 0

    def attach_one(x: Any) -> Any:
        nonlocal position
        spec = spec_of(position, x)
        position += 1
        if x.__class__ is not _Tensor and x._spec is spec:
            return x
        specs.append(spec)
        return attach(x if x.__class__ is _Tensor else plain(x), spec)

    return map_tensors(out, attach_one), specs


def check_partial(what: str, spec: TensorSpec) -> None:
    """Raise if ``spec`` is partial and its dtype does not support the reduction.

    ``what`` is the name of the call, for the message.

    Raises:
        ValueError: the spec has P and its dtype cannot be summed (bool), or it has P(max) or P(min)
            and its dtype has no order (complex).
    """
    if fault := invalid_dtype_reason(spec):
        raise ValueError(
            f"{what}: {spec}: {fault}. Use S or B, or another dtype such as torch.int64."
        )
