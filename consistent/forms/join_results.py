"""Functions for forms that join the ranks' small results: the place of this rank's result in a
stack of all, and the part of the joined result that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..movement import differentiable
from ..spec import B, S, Sbp, Split, TensorSpec
from .registry import Shards


def slot(shard: Shards) -> tuple[int, int]:
    """(place of this rank among the ranks that the form joins, how many they are), in the order
    of a split."""
    shape = [shard.placement.shape[axis] for axis in shard.axes]
    index = 0
    for axis, n in zip(shard.axes, shape, strict=True):
        index = index * n + (0 if shard.coordinate is None else shard.coordinate[axis])
    return index, math.prod(shape)


def stack(shard: Shards, x: Tensor) -> Tensor:
    """[...] of each rank -> [ranks, ...] on all of them; differentiable."""
    return _laid(shard, x, B)


def parted(shard: Shards, x: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """``stack`` where the op's result is whole; where it is split, this rank's part of each row.

    ``dims`` are those of ``x`` that the result no longer has.
    """
    entry = shard.outs[0].sbp[shard.axes[0]]
    if not isinstance(entry, Split):
        return stack(shard, x)
    return _laid(shard, x, S(1 + _kept(x, dims)[entry.dim]))


def _laid(shard: Shards, x: Tensor, entry: Sbp) -> Tensor:
    """Every rank's ``x`` is row ``slot`` of a tensor split by rows; this boxes it to ``entry``."""
    rows, after = (
        tuple(e if a in shard.axes else B for a in range(shard.placement.ndim))
        for e in (S(0), entry)
    )
    shape = (slot(shard)[1], *x.shape)
    src = TensorSpec.of(shard.placement, rows, shape, x.dtype)
    return differentiable.box(x.unsqueeze(0).contiguous(), src, src.with_sbp(after))


def own_part(shard: Shards, x: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """This rank's part of the whole result ``x``, if the op's result is split; ``dims`` as in
    ``parted``."""
    entry = shard.outs[0].sbp[shard.axes[0]]
    if not isinstance(entry, Split):
        return x
    start, size = (side[entry.dim] for side in shard.outs[0].region(shard.coordinate))
    return x.narrow(_kept(x, dims)[entry.dim], start, size)


def _kept(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d for d in range(x.ndim) if d not in dims]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that torch accumulates results of ``dtype`` in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision that torch accumulates it in."""
    return x.to(wide_dtype(x.dtype))


def summed(shard: Shards, addend: Tensor) -> Tensor:
    """The sum of the ranks' addends: each rank keeps its own where the result is P; else they are
    added before they are rounded to the dtype of the result."""
    out = shard.outs[0]
    if out.sbp[shard.axes[0]].is_partial:
        return addend.to(out.dtype)
    return shard.sum(addend).to(out.dtype)


def restored(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A reduced tensor with its reduced dims back, of size 1."""
    for d in () if keepdim else sorted(dims):
        x = x.unsqueeze(d)
    return x


def dropped(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """``x``, which was reduced with ``keepdim=True``, without the reduced dims unless
    ``keepdim``."""
    return x if keepdim else x.squeeze(tuple(dims))
