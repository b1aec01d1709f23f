"""Boxing a tensor to another layout, and taking its pieces out."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from mirrored import mirrored_tensor
from mirrored.mirrored_tensor import MirroredTensor

from ...dispatch.plans.shards import attach, check_partial, plain
from ...dispatch.running.moved_views import fresh
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
    """Move the logical tensor to another placement or SBP; what is not given is kept.

    Every rank of the world calls it. Ranks outside a placement hold a ``meta`` shard of the
    tensor there, so they know its shape and keep the same autograd graph. Differentiable any number
    of times.

    ``grad_sbp``: in backward the gradient is first boxed to this SBP on the target, which says
    where a reduction happens.

    Raises:
        ValueError: the SBP does not fit the placement, the shape or the dtype.
        RuntimeError: the placement names ranks that the world does not have.
    """
    spec: TensorSpec = self._spec  # type: ignore[attr-defined]
    where = spec.placement if placement is None else placement
    if where != spec.placement:
        check_world("to_global", where)
    entries = resolve_sbp(spec.sbp if sbp is None else sbp, where, spec.shape)
    target = TensorSpec.of(where, entries, spec.shape, spec.dtype)
    wanted = None if grad_sbp is None else resolve_sbp(grad_sbp, where, spec.shape)
    if target is spec and wanted is None:
        return self
    check_partial("to_global", target)
    if _HANDLE_TO_GLOBAL:
        return _HANDLE_TO_GLOBAL[-1](self, target, grad_sbp)
    check_mode.calling("to_global")
    x = fresh(self)
    out = box(x, spec, target, wanted)
    moved = attach(plain(out) if out is x else out, target)
    for notify in _ON_TO_GLOBAL:
        notify(self, moved)
    return moved


def to_local(self: Any) -> torch.Tensor:
    """This rank's shard as a plain tensor that shares its storage; empty on a rank outside the
    placement.

    Differentiable: the gradient that flows back is taken as this rank's shard in the dual SBP,
    so the gradient of a B tensor counts as an addend.
    """
    for notify in _ON_LAYOUT_READ:
        notify(self)
    if my_coordinate(self._spec.placement) is None:
        return torch.empty(0, dtype=self.dtype, device=self.device)
    return plain(fresh(self))


def sbp_of(self: Any) -> NdSbp:
    """How the ranks of each axis hold it."""
    for notify in _ON_LAYOUT_READ:
        notify(self)
    return self._spec.sbp


def to_mirrored(self: Any) -> MirroredTensor:
    """The pieces as a list with one element per device, in the placement's order of ranks; shares
    storage.

    The way back is ``mirrored.to_global(sbp, placement=...)`` with the SBP that this tensor
    has. Differentiable like ``to_local``. Pieces of a dim that does not split evenly differ in
    shape.
    """
    for notify in _ON_LAYOUT_READ:
        notify(self)
    ranks = self._spec.placement.ranks.ravel().tolist()
    return mirrored_tensor.from_local(plain(fresh(self)), ranks)
