"""Forms of order statistics along a split dim: median, nanmedian, kthvalue, quantile, nanquantile.

Nothing is sorted. Elements are converted to integer keys with the same order. The ranks count how
many of their keys start with each byte, sum the counts over the ranks, and so find the wanted key
byte by byte. Equal keys are ordered by their position in the logical tensor. Each byte costs 256
counts per row, however long the rows are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....movement.grad_mode import records
from ...join_results import index_and_count, stack
from ...registry import Shards, form
from .extremes import share_gradient
from .sort_keys import sort_keys


def _as_rows(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Reshape ``x`` to [rows, items], with ``dims`` moved to the end and flattened."""
    kept_dims = [d for d in range(x.ndim) if d not in dims]
    moved = x.permute(*kept_dims, *dims) if x.ndim else x
    rows = moved.shape[: len(kept_dims)].numel()
    return moved.reshape(rows, x.numel() // rows if rows else 0)


def _keys_at(shard: Shards, key: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key at each of ``places`` in the sorted rows, without sorting.

    Args:
        shard: the call.
        key: sort keys of this rank's items, [rows, own items].
        places: positions in the sorted rows, [places, rows], the same on every rank.

    Returns:
        (the keys; how many equal keys come before each place), both [places, rows].
    """
    bits = key.dtype.itemsize * 8
    key, prefix = key.long().unsqueeze(0), torch.zeros_like(places)
    for shift in range(bits - 8, -1, -8):
        is_first_byte = shift == bits - 8
        byte = (key >> shift) & 255
        # Flip the sign bit, so that negative keys come first.
        byte = byte ^ 128 if is_first_byte else byte
        has_prefix = byte >= 0 if is_first_byte else (key >> (shift + 8)) == prefix.unsqueeze(-1)
        counts = torch.zeros(*places.shape, 256, dtype=torch.int64, device=key.device)
        counts.scatter_add_(-1, *(t.expand(*places.shape, -1) for t in (byte, has_prefix.long())))
        counts = shard.sum(counts)
        ends = counts.cumsum(-1)
        chosen_byte = (ends <= places.unsqueeze(-1)).sum(-1, keepdim=True).clamp_max(255)
        places = places - (ends - counts).gather(-1, chosen_byte).squeeze(-1)
        chosen_byte = chosen_byte.squeeze(-1)
        prefix = chosen_byte - 128 if is_first_byte else prefix * 256 + chosen_byte
    return prefix, places


def _items_at(
    shard: Shards, x: Tensor, key: Tensor, places: Tensor, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (values, indices along the reduced dim) at ``places`` of the sorted rows.

    Both are [places, rows], on every rank. ``x`` are this rank's items, [rows, own items], ``key``
    their sort keys, and ``start`` is the logical index of the first.
    """
    wanted_keys, nth = _keys_at(shard, key, places)
    ties = key.long() == wanted_keys.unsqueeze(-1)
    own_count = ties.sum(-1)
    nth = nth - stack(shard, own_count)[: index_and_count(shard)[0]].sum(0)
    is_own = (nth >= 0) & (nth < own_count)
    index = (ties.cumsum(-1) <= nth.unsqueeze(-1)).sum(-1).masked_fill(~is_own, x.shape[1])
    padded = torch.cat([x, x.new_zeros(x.shape[0], 1)], 1)
    values = padded.expand(len(places), *padded.shape).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return shard.sum(values), shard.sum((index + start).masked_fill(~is_own, 0))


def _median_position(shard: Shards, x: Tensor, n: int) -> Tensor:
    """Return the position of the median in each sorted row of ``n`` items, as [1, rows].

    For median, a row with a NaN gives the position of a NaN; for nanmedian NaNs are not counted.
    ``x`` are the items of these rows that this rank holds; the other ranks hold the rest.
    """
    nans = shard.sum(x.isnan().sum(-1))
    if shard.call.name == "nanmedian":
        return ((n - nans - 1) // 2).clamp_min(0).unsqueeze(0)
    return torch.where(nans > 0, n - nans, (n - 1) // 2).unsqueeze(0)


@form("order_statistic")
def _order_statistic(shard: Shards) -> Any:
    """Run kthvalue, or median or nanmedian along a dim, and return (values, indices)."""
    x, (dim,) = shard.tensors[0], shard.call.dims("dim", -1)
    rows, n = _as_rows(x, (dim,)), shard.specs[0].shape[dim]
    if shard.call.name == "kthvalue":
        places = torch.full((1, len(rows)), shard.get("k") - 1, device=x.device)
    else:
        places = _median_position(shard, rows, n)
    results = _items_at(shard, rows, sort_keys(rows), places, shard.region()[0][dim])
    shape = shard.out_shape()
    return getattr(torch.return_types, shard.call.name)(tuple(t.reshape(shape) for t in results))


@form("median_of_all")
def _median_of_all(shard: Shards) -> Tensor:
    """Run median or nanmedian of all elements. Ties share the gradient."""
    x = shard.tensors[0]
    with torch.no_grad():
        flat = x.reshape(1, -1)
        places = _median_position(shard, flat, shard.specs[0].numel)
        value = _items_at(shard, flat, sort_keys(flat), places)[0].reshape(())
    if not records((x,)):
        return value
    with torch.no_grad():
        ties = (x == value) | (x.isnan() & value.isnan())
    return share_gradient(shard, x, value, ties, range(x.ndim)).reshape(())


@form("quantile")
def _quantile(shard: Shards) -> Tensor:
    """Run quantile or nanquantile.

    They interpolate between the elements around the fraction q of the sorted order.
    """
    x, dims, q = shard.tensors[0], shard.call.dims(), shard.get("q")
    rows, n = _as_rows(x, dims), math.prod(shard.specs[0].shape[d] for d in dims)
    q = (q if isinstance(q, Tensor) else x.new_tensor(q)).reshape(-1, 1)
    # Torch makes this check only on the CPU, where it need not wait for values. Every rank has all
    # of q, so all ranks raise together.
    if q.device.type == "cpu" and not ((q >= 0) & (q <= 1)).all():
        raise RuntimeError(f"{shard.call.name}() q values must be in the range [0, 1]")
    nans = shard.sum(rows.isnan().sum(-1))
    if shard.call.name == "nanquantile":
        place = q * (n - nans - 1).clamp_min(0)
    else:
        place = (q * (n - 1)).expand(-1, len(rows)).masked_fill(nans > 0, n - 1)
    interpolation = shard.get("interpolation", "linear")
    if interpolation in _ROUNDING:
        result = _items_at(shard, rows, sort_keys(rows), _ROUNDING[interpolation](place).long())[0]
    else:
        below = place.floor()
        ends = torch.cat([below, place.ceil()]).long()
        low, high = _items_at(shard, rows, sort_keys(rows), ends)[0].chunk(2)
        result = low.lerp(
            high, (place - below) if interpolation == "linear" else low.new_tensor(0.5)
        )
    return result.reshape(shard.out_shape())


_ROUNDING = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
