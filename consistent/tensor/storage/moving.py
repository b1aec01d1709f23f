"""Conversion of a global tensor: to another layout (boxing), to its shard, to a mirrored one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from mirrored import mirrored_tensor
from mirrored.mirrored_tensor import MirroredTensor

from ...dispatch.plans.shards import attach, check_partial, plain
from ...dispatch.running.moved_views import refresh
from ...movement import check_mode
from ...movement.boxed import box
from ...movement.world import my_coordinate
from ...spec import NdSbp, Placement, SbpLike, TensorSpec, resolve_sbp
from ...spec.tracer import callbacks
from ..making.create import check_world

T = TypeVar("T")  # GlobalTensor

_ON_TO_GLOBAL, _ON_LAYOUT_READ = callbacks("on_to_global"), callbacks("on_layout_read")
_HANDLE_TO_GLOBAL = callbacks("handle_to_global")


def to_global(
    self: T,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    grad_sbp: SbpLike | None = None,
) -> T:
    """Redistribute the tensor to another placement or SBP; what is None stays as it is.

    Every rank of the world must call this. Ranks outside a placement hold a ``meta`` tensor as
    their shard, so they know its shape and keep the same autograd graph. Differentiable any number
    of times.

    Args:
        placement: the placement to move to.
        sbp: the SBP of each axis to convert to: S (sharded), B (replicated), P (partial sum).
        grad_sbp: in backward the gradient is first converted to this SBP on the target placement,
            which decides where a reduction happens.

    Returns:
        The moved tensor; this tensor itself if nothing changes.

    Raises:
        ValueError: the SBP does not fit the placement, the shape or the dtype.
        RuntimeError: the placement names ranks that the world does not have.
    """
    spec: TensorSpec = self._spec  # type: ignore[attr-defined]
    target_placement = spec.placement if placement is None else placement
    if target_placement != spec.placement:
        check_world("to_global", target_placement)
    entries = resolve_sbp(spec.sbp if sbp is None else sbp, target_placement, spec.shape)
    target = TensorSpec.of(target_placement, entries, spec.shape, spec.dtype)
    grad_entries = None if grad_sbp is None else resolve_sbp(grad_sbp, target_placement, spec.shape)
    if target is spec and grad_entries is None:
        return self
    check_partial("to_global", target)
    if _HANDLE_TO_GLOBAL:
        return _HANDLE_TO_GLOBAL[-1](self, target, grad_sbp)
    check_mode.set_current_op("to_global")
    x = refresh(self)
    out = box(x, spec, target, grad_entries)
    # `attach` changes its argument in place, so an ``x`` that was not moved needs an alias.
    result = attach(plain(out) if out is x else out, target)
    for notify in _ON_TO_GLOBAL:
        notify(self, result)
    return result


def to_local(self: Any) -> torch.Tensor:
    """Return this rank's shard as a plain tensor that shares its storage.

    On a rank outside the placement the result is empty. Differentiable: the gradient of the result
    counts as this rank's shard of the global gradient in the dual SBP. So for a replicated (B)
    tensor the ranks' gradients are addends (P), and are summed.
    """
    for notify in _ON_LAYOUT_READ:
        notify(self)
    if my_coordinate(self._spec.placement) is None:
        return torch.empty(0, dtype=self.dtype, device=self.device)
    return plain(refresh(self))


def sbp_of(self: Any) -> NdSbp:
    """Return the SBP of each axis: whether it shards, replicates or partially sums the tensor."""
    for notify in _ON_LAYOUT_READ:
        notify(self)
    return self._spec.sbp


def to_mirrored(self: Any) -> MirroredTensor:
    """Return the shards as a mirrored tensor, which has one element per device, sharing storage.

    The elements are in the placement's order of ranks. ``mirrored.to_global(sbp, placement=...)``
    with the SBP of this tensor converts back. Differentiable like ``to_local``. If a dim does not
    divide evenly, the shards differ in shape.
    """
    for notify in _ON_LAYOUT_READ:
        notify(self)
    ranks = self._spec.placement.ranks.ravel().tolist()
    return mirrored_tensor.from_local(plain(refresh(self)), ranks)
