"""``torch._foreach_norm`` on global tensors, for clipping: one reduction for many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....movement.boxed import box
from ....movement.differentiable import max_over, min_over, sum_over
from ....movement.grad_mode import records
from ....movement.world import whole_on_world
from ....spec import B, Placement, TensorSpec
from ...plans.shards import attach, is_global, plain, rebox

_WIDE = torch.float64  # powers of the ranks' norms neither overflow nor underflow in it


def norm(tensors: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None) -> tuple:  # noqa: A002
    """Return the norm of each tensor in ``tensors``, computed over the whole logical tensor.

    The norms of all tensors that are on one placement and split over the same axes are reduced over
    the ranks in one collective. Each norm is a 0-d B tensor. If the tensors are on different
    placements, or some are plain, the norms are plain tensors instead, equal on every rank, because
    gradient clipping combines them to one norm and scales each tensor by it. ``ord`` and ``dtype``
    are as in ``torch.linalg.vector_norm``.
    """
    if records(tensors):
        return tuple(torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors)
    groups: dict[tuple, list[int]] = {}
    whole = [_settled(t) for t in tensors]
    for i, t in enumerate(whole):
        groups.setdefault(_group_of(t, dtype), []).append(i)
    apart = len({placement for placement, *_ in groups}) > 1
    outs: list[Any] = [None] * len(whole)
    for (placement, axes, result), members in groups.items():
        some = [whole[i] for i in members]
        norms = _norms(some, placement, axes, ord, dtype).to(result)
        for i, one in zip(members, _placed(norms, placement, apart), strict=True):
            outs[i] = one
    return tuple(outs)


def powsum(x: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:  # noqa: A002
    """Return the sum of ``abs(x) ** ord``, as ``torch._foreach_powsum`` does for each tensor."""
    return x.abs().pow(ord).sum(dtype=dtype or x.abs().dtype)


def _settled(t: Any) -> Any:
    """Return ``t`` with its P axes boxed to B, since the norm of a sum is not a sum of norms."""
    if not is_global(t) or not any(e.is_partial for e in t._spec.sbp):
        return t
    return rebox(t, t._spec.with_sbp(tuple(B if e.is_partial else e for e in t._spec.sbp)), "norm")


def _group_of(t: Any, dtype: torch.dtype | None) -> tuple:
    """Return a key; tensors with equal keys are reduced over the ranks together.

    It is (placement, axes over which their norms are reduced, dtype of the norms). For a plain
    tensor: (None, (), dtype).
    """
    result = (t.dtype if dtype is None else dtype).to_real()
    if not is_global(t):
        return None, (), result
    axes = tuple(axis for axis, entry in enumerate(t._spec.sbp) if entry.is_split)
    return t._spec.placement, axes if t._spec.numel else (), result


def _norms(
    tensors: Sequence[Any],
    placement: Placement | None,
    axes: tuple[int, ...],
    ord: float,  # noqa: A002
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return the norms of the tensors of one group, stacked into a 1-d tensor of float64.

    Each rank computes the norms of its shards and ``axes`` are reduced over: for the 2-norm, by the
    square root of the sum of squares.
    """
    shards = [plain(t) for t in tensors]
    wide = torch.promote_types(shards[0].dtype if dtype is None else dtype, torch.float32)
    if axes:
        # An empty shard contributes nothing, but for some orders torch raises on it.
        nothing = float("inf") if ord < 0 else 0.0
        shards = [x if x.numel() else x.new_full((1,), nothing) for x in shards]
    local = torch._foreach_norm(shards, ord, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    found = torch.stack(list(local)).to(_WIDE)
    if placement is None or not axes:
        return found
    if ord in (float("inf"), -float("inf")):
        return (max_over if ord > 0 else min_over)(found, placement, axes)
    if ord == 0:
        return sum_over(found, placement, axes)
    return sum_over(found**ord, placement, axes) ** (1 / ord)


def _placed(norms: torch.Tensor, placement: Placement | None, apart: bool) -> Sequence[Any]:
    """Return the stacked ``norms`` of one group as one 0-d tensor per norm.

    They are global B tensors. If ``apart``, which says that the tensors of the call are on several
    placements or partly plain, they are plain tensors, equal on all ranks.
    """
    if placement is None:
        return norms.unbind(0)
    spec = TensorSpec.of(placement, (B,) * placement.ndim, norms.shape, norms.dtype)
    if apart:
        return box(norms, spec, whole_on_world(spec)).unbind(0)
    scalar = TensorSpec.of(placement, spec.sbp, (), norms.dtype)
    return [attach(one, scalar) for one in norms.unbind(0)]
