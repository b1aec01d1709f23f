"""Helpers for forms that reduce the shard first, and then join the ranks' small results.

They stack the results of all ranks, and cut the joined result to the part that a rank keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..movement import differentiable
from ..spec import B, S, Sbp, Split, TensorSpec
from .registry import Shards


def index_and_count(shard: Shards) -> tuple[int, int]:
    """Return (index of this rank among ``shard.ranks``, number of these ranks).

    They are the ranks along the form's axes, in the order in which these axes would split a dim.
    """
    shape = [shard.placement.shape[axis] for axis in shard.axes]
    index = 0
    for axis, n in zip(shard.axes, shape, strict=True):
        index = index * n + (0 if shard.coordinate is None else shard.coordinate[axis])
    return index, math.prod(shape)


def stack(shard: Shards, x: Tensor) -> Tensor:
    """Gather the result ``x`` of each rank, of shape [...], into [ranks, ...] on every rank.

    Differentiable.
    """
    return _stack_and_box(shard, x, B)


def stack_own_part(shard: Shards, x: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """Stack the ranks' results as [ranks, ...], and keep this rank's part of the op's result.

    If the op's result is not split, the part is the whole result and this is ``stack``. Otherwise
    each rank sends to every other rank only the part that the receiver keeps. Differentiable.

    Args:
        shard: the call.
        x: this rank's result.
        dims: dims of ``x``, of size 1, that the op's result no longer has.
    """
    entry = shard.outs[0].sbp[shard.axes[0]]
    if not isinstance(entry, Split):
        return stack(shard, x)
    # Dim 0 of the stack is the ranks, so the dims of ``x`` follow from 1 on.
    return _stack_and_box(shard, x, S(1 + _remaining_dims(x, dims)[entry.dim]))


def _stack_and_box(shard: Shards, x: Tensor, entry: Sbp) -> Tensor:
    """Stack the ranks' results ``x`` along a new dim 0, boxed to ``entry``: B, or a split.

    Before boxing, each rank holds its own row of the stack.
    """
    row_sbp, target_sbp = (
        tuple(e if a in shard.axes else B for a in range(shard.placement.ndim))
        for e in (S(0), entry)
    )
    shape = (index_and_count(shard)[1], *x.shape)
    src = TensorSpec.of(shard.placement, row_sbp, shape, x.dtype)
    return differentiable.box(x.unsqueeze(0).contiguous(), src, src.with_sbp(target_sbp))


def own_part(shard: Shards, x: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """Return this rank's part of the whole result ``x``, or ``x`` if the op's result is not split.

    ``dims`` are as in ``stack_own_part``.
    """
    entry = shard.outs[0].sbp[shard.axes[0]]
    if not isinstance(entry, Split):
        return x
    start, size = (side[entry.dim] for side in shard.outs[0].region(shard.coordinate))
    return x.narrow(_remaining_dims(x, dims)[entry.dim], start, size)


def _remaining_dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    """Return the dims of ``x`` not in ``dims``; the i-th of them is dim i of the op's result."""
    return [d for d in range(x.ndim) if d not in dims]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch accumulates values of ``dtype``.

    It is float32 for float16 and bfloat16, else ``dtype``.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def widen(x: Tensor) -> Tensor:
    """Convert ``x`` to the dtype in which torch accumulates it."""
    return x.to(accumulation_dtype(x.dtype))


def sum_addends(shard: Shards, addend: Tensor) -> Tensor:
    """Return the op's result from the addends of the ranks, in the dtype of the op's result.

    If the result is P, it is this rank's ``addend`` itself. Otherwise the addends are all-reduced
    before they are rounded to that dtype.
    """
    out = shard.outs[0]
    if out.sbp[shard.axes[0]].is_partial:
        return addend.to(out.dtype)
    return shard.sum(addend).to(out.dtype)


def unsqueeze_reduced(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Insert the reduced ``dims`` into ``x`` as dims of size 1, unless ``keepdim`` has kept them.

    Shape [2, 3] with ``dims=[1]`` becomes [2, 1, 3].
    """
    for d in () if keepdim else sorted(dims):
        x = x.unsqueeze(d)
    return x


def squeeze_reduced(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Remove the reduced dims, which have size 1, from ``x`` unless ``keepdim``."""
    return x if keepdim else x.squeeze(tuple(dims))
