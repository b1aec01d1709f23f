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
    inputs = [_reduce_partial(t) for t in tensors]
    for i, t in enumerate(inputs):
        groups.setdefault(_group_key(t, dtype), []).append(i)
    are_mixed = len({placement for placement, *_ in groups}) > 1
    outs: list[Any] = [None] * len(inputs)
    for (placement, axes, result), members in groups.items():
        group_inputs = [inputs[i] for i in members]
        norms = _group_norms(group_inputs, placement, axes, ord, dtype).to(result)
        for i, value in zip(members, _unbind_norms(norms, placement, are_mixed), strict=True):
            outs[i] = value
    return tuple(outs)


def powsum(x: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:  # noqa: A002
    """Return the sum of ``abs(x) ** ord``, as ``torch._foreach_powsum`` does for each tensor."""
    return x.abs().pow(ord).sum(dtype=dtype or x.abs().dtype)


def _reduce_partial(t: Any) -> Any:
    """Return ``t`` with its P axes boxed to B, since the norm of a sum is not a sum of norms."""
    if not is_global(t) or not any(e.is_partial for e in t._spec.sbp):
        return t
    return rebox(t, t._spec.with_sbp(tuple(B if e.is_partial else e for e in t._spec.sbp)), "norm")


def _group_key(t: Any, dtype: torch.dtype | None) -> tuple:
    """Return the key of the group in which the norm of ``t`` is reduced over the ranks.

    The norms of all tensors with equal keys are reduced in one collective. A key is (placement,
    axes over which the norms are reduced, dtype of the norms); for a plain tensor (None, (),
    dtype).
    """
    result = (t.dtype if dtype is None else dtype).to_real()
    if not is_global(t):
        return None, (), result
    axes = tuple(axis for axis, entry in enumerate(t._spec.sbp) if entry.is_split)
    return t._spec.placement, axes if t._spec.numel else (), result


def _group_norms(
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
        neutral = float("inf") if ord < 0 else 0.0
        shards = [x if x.numel() else x.new_full((1,), neutral) for x in shards]
    local = torch._foreach_norm(shards, ord, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    norms = torch.stack(list(local)).to(_WIDE)
    if placement is None or not axes:
        return norms
    if ord in (float("inf"), -float("inf")):
        return (max_over if ord > 0 else min_over)(norms, placement, axes)
    if ord == 0:
        return sum_over(norms, placement, axes)
    return sum_over(norms**ord, placement, axes) ** (1 / ord)


def _unbind_norms(
    norms: torch.Tensor, placement: Placement | None, are_mixed: bool
) -> Sequence[Any]:
    """Return the stacked ``norms`` of one group as one 0-d tensor per norm.

    They are global B tensors. If ``are_mixed``, which says that the tensors of the call are on
    several placements or partly plain, they are plain tensors, equal on all ranks.
    """
    if placement is None:
        return norms.unbind(0)
    spec = TensorSpec.of(placement, (B,) * placement.ndim, norms.shape, norms.dtype)
    if are_mixed:
        return box(norms, spec, whole_on_world(spec)).unbind(0)
    scalar = TensorSpec.of(placement, spec.sbp, (), norms.dtype)
    return [attach(value, scalar) for value in norms.unbind(0)]
