"""Forms of the ops that count elements in row-major order: each rank translates places in the whole
into places in its shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.signature import Operand
from .forms import Shards, form
from .reduce import slot, stack


def _own_places(shard: Shards, index: Tensor) -> tuple[Tensor, Tensor]:
    """(place in the flattened shard of each place in the flattened whole, which lie elsewhere)."""
    shape, total = shard.specs[0].shape, shard.specs[0].numel
    # Masking would hide what torch refuses.
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        ((index >= -total) & (index < total)).all(), f"{shard.call.name}: index out of range"
    )
    rest = torch.where(index < 0, index + total, index)
    place, outside = torch.zeros_like(rest), torch.zeros_like(rest, dtype=torch.bool)
    scale = 1
    for n, start, size in reversed(list(zip(shape, *shard.box(), strict=True))):
        at = rest % max(n, 1) - start
        rest = rest // max(n, 1)
        outside |= (at < 0) | (at >= size)
        place, scale = place + at * scale, scale * size
    return place.masked_fill(outside, 0), outside


def _with_spare(x: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1), x.new_zeros(1)])


@form("take")
def _take(shard: Shards) -> Tensor:
    """take, and take_along_dim without a dim."""
    x, index = shard.tensors[0], shard.get("index")
    place, outside = _own_places(shard, index)
    out = _with_spare(x).take(place.masked_fill(outside, x.numel()))
    return out.reshape(shard.out_shape())


@form("put")
def _put(shard: Shards) -> Tensor:
    """What lies elsewhere goes to a spare element."""
    x = shard.tensors[0]
    place, outside = _own_places(shard, shard.get("index"))
    place = place.masked_fill(outside, x.numel())
    how = bool(shard.get("accumulate", False))
    out = _with_spare(x).put(place, shard.get("source"), how)[:-1].reshape(x.shape)
    return x.copy_(out) if shard.call.inplace else out


@form("masked_scatter")
def _masked_scatter(shard: Shards) -> Tensor:
    """Each True of the shard takes the value that has its number in the whole."""
    x, mask, source = (shard.get(name) for name in ("input", "mask", "source"))
    operand = shard.call.get("mask")
    assert isinstance(operand, Operand)
    starts, sizes = shard.box()
    if not shard.specs[operand.index].sbp[shard.axes[0]].is_split:
        mask = mask.expand(shard.specs[0].shape)
        number = (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)
        for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            number, mask = number.narrow(d, start, size), mask.narrow(d, start, size)
    else:
        before = stack(shard, mask.sum())[: slot(shard)[0]].sum()
        number = (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape) + before
    given = _with_spare(source)
    number = number.masked_fill(~mask, source.numel())
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        ((number < source.numel()) | ~mask).all(), "masked_scatter: more places than values"
    )
    out = torch.where(mask, given[number.clamp_max(source.numel())], x)
    return x.copy_(out) if shard.call.inplace else out
