"""Forms of histc and histogram, whose bins span the range of values of all shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...registry import Shards, form
from ..reductions.extremes import local_extreme


def _value_range(shard: Shards) -> tuple[float, float]:
    """Return the smallest and largest element of all shards, as limits of the bins.

    If the two are equal, they are moved apart by 1 each, as in torch.
    """
    x = shard.tensors[0].detach().reshape(-1)
    low, high = (local_extreme(x, (0,), is_max) for is_max in (False, True))
    low, high = shard.min(low).item(), shard.max(high).item()
    return (low - 1, high + 1) if low == high else (low, high)


@form("histc")
def _histc(shard: Shards) -> Tensor:
    x = shard.tensors[0]
    if shard.coordinate is None:
        return x.new_zeros(shard.out_shape())
    low, high = shard.get("min", 0), shard.get("max", 0)
    if low == high:
        low, high = _value_range(shard) if shard.specs[0].numel else (0, 1)
    return torch.histc(x, shard.get("bins", 100), low, high)


@form("histogram")
def _histogram(shard: Shards) -> Any:
    x, bins, limits = shard.tensors[0], shard.get("bins"), shard.kwargs.get("range")
    if shard.coordinate is None:
        counts, edges = (x.new_zeros(shard.out_shape(i)) for i in range(2))
        return torch.return_types.histogram((counts, edges))
    if not isinstance(bins, Tensor) and limits is None:
        limits = _value_range(shard) if shard.specs[0].numel else (0.0, 1.0)
    range_argument: dict[str, Any] = {} if isinstance(bins, Tensor) else {"range": limits}
    counts, edges = torch.histogram(x, bins, weight=shard.kwargs.get("weight"), **range_argument)
    if shard.kwargs.get("density", False):
        # torch's density divides by the shard's total; this divides by the total of all shards.
        counts = counts / shard.sum(counts.sum()) / edges.diff()
    return torch.return_types.histogram((counts, edges))
