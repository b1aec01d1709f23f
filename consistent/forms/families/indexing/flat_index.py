"""Forms of ops that index elements in row-major order, such as take, put and masked_scatter.

Each rank translates indices into the flattened logical tensor to indices into its own shard. The
form of ``x[mask] = value`` is also here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....rules.families.indexing.data_dependent import operand_and_mask
from ....rules.signature import Operand
from ...join_results import index_and_count, stack
from ...refused import require, require_in_range
from ...registry import Shards, form


def _shard_index(shard: Shards, index: Tensor) -> tuple[Tensor, Tensor]:
    """Translate indices into the flattened logical tensor to indices into the flattened shard.

    Returns:
        (index in this rank's shard, mask of the indices whose element another rank holds). Such an
            index is 0.
    """
    shape, total = shard.specs[0].shape, shard.specs[0].numel
    # Check first: the masking below would hide indices that torch rejects.
    require_in_range(index, total, shard.call.name)
    remainder = torch.where(index < 0, index + total, index)
    place, outside = torch.zeros_like(remainder), torch.zeros_like(remainder, dtype=torch.bool)
    scale = 1
    for n, start, size in reversed(list(zip(shape, *shard.region(), strict=True))):
        local = remainder % max(n, 1) - start
        remainder = remainder // max(n, 1)
        outside |= (local < 0) | (local >= size)
        place, scale = place + local * scale, scale * size
    return place.masked_fill(outside, 0), outside


def _append_zero(x: Tensor) -> Tensor:
    """Flatten ``x`` and append a zero, to be read or written for elements of other ranks."""
    return torch.cat([x.reshape(-1), x.new_zeros(1)])


@form("take")
def _take(shard: Shards) -> Tensor:
    """Run take, or take_along_dim without a dim, with 0 for the elements that other ranks hold."""
    x, index = shard.tensors[0], shard.get("index")
    place, outside = _shard_index(shard, index)
    # Elements of other ranks read the spare element, which is 0.
    out = _append_zero(x).take(place.masked_fill(outside, x.numel()))
    return out.reshape(shard.out_shape())


@form("put")
def _put(shard: Shards) -> Tensor:
    """Run put; values for elements of other ranks go to a spare element that is then cut off."""
    x = shard.tensors[0]
    place, outside = _shard_index(shard, shard.get("index"))
    place = place.masked_fill(outside, x.numel())
    accumulate = bool(shard.get("accumulate", False))
    out = _append_zero(x).put(place, shard.get("source"), accumulate)[:-1].reshape(x.shape)
    return x.copy_(out) if shard.call.inplace else out


@form("masked_scatter")
def _masked_scatter(shard: Shards) -> Tensor:
    """Run masked_scatter on this rank's part of the mask.

    Each True takes the value whose index is the number of Trues before it in the whole mask.
    """
    x, mask, source = (shard.get(name) for name in ("input", "mask", "source"))
    operand = shard.call.get("mask")
    assert isinstance(operand, Operand)
    if not shard.specs[operand.index].sbp[shard.axes[0]].is_split:
        mask = mask.expand(shard.specs[0].shape)
    mask, number = _number_trues(shard, operand, mask)
    out = torch.where(mask, _select_values(shard, source.reshape(-1), mask, number), x)
    return x.copy_(out) if shard.call.inplace else out


@form("masked_write")
def _masked_write(shard: Shards) -> Tensor:
    """Run x[mask] = value where ``value`` has one row for each True of the mask.

    Each rank writes the rows whose Trues are in its shard.
    """
    pair = operand_and_mask(shard.call)
    assert pair is not None
    x, value = shard.tensors[0], shard.tensors[-1]
    mask, number = _number_trues(shard, pair[1], shard.tensors[pair[1].index])
    values = _select_values(shard, value.to(x.dtype), mask, number)
    out = torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), values, x)
    return x.copy_(out) if shard.call.inplace else out


def _number_trues(shard: Shards, operand: Operand, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of ``mask``, and for each True how many Trues come before it.

    ``mask`` is the shard of ``operand``, or the whole mask if ``operand`` is not split.

    Returns:
        (part of the mask, number of Trues before each element in the whole mask). The number says
            which row of the values a True takes; where the mask is False it means nothing.
    """
    if shard.specs[operand.index].sbp[shard.axes[0]].is_split:
        trues_before = stack(shard, mask.sum())[: index_and_count(shard)[0]].sum()
        return mask, (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape) + trues_before
    number = (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)
    for d, (start, size) in enumerate(zip(*shard.region(), strict=True)):
        if d < mask.ndim:
            number, mask = number.narrow(d, start, size), mask.narrow(d, start, size)
    return mask, number


def _select_values(shard: Shards, rows: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    """Return ``rows[number]``, the row of the values for each element of the mask.

    Where the mask is False, the row is arbitrary. Raises if there are fewer rows than Trues.
    """
    n = len(rows)
    require(((number < n) | ~mask).all(), f"{shard.call.name}: more places than values")
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded[number.masked_fill(~mask, n).clamp(0, n)]
