"""Forms of scans along a split dim: cumsum, cumprod, logcumsumexp, cummax, cummin, trapezoid.

Each rank scans its shard, starting from the totals of the shards before it. Only pieces at the end
of a split are empty, so the total of an empty shard is never read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirrored.reduction import identity

from ...join_results import accumulation_dtype, index_and_count, stack, sum_addends, widen
from ...registry import Shards, form, write_if_inplace


def _totals_before(shard: Shards, total: Tensor) -> Tensor:
    """Gather the ranks' totals; return those of the shards before this one as [shards, ...]."""
    return stack(shard, total)[: index_and_count(shard)[0]]


@form("cumsum")
def _cumsum(shard: Shards) -> Tensor:
    x, dim, dtype = shard.tensors[0], shard.call.dim(), shard.outs[0].dtype
    x = x.to(accumulation_dtype(dtype))
    prefix = _totals_before(shard, x.sum(dim, keepdim=True)).sum(0)
    return write_if_inplace(shard, (x.cumsum(dim) + prefix).to(dtype))


@form("cumprod")
def _cumprod(shard: Shards) -> Tensor:
    x, dim, dtype = shard.tensors[0].clone(), shard.call.dim(), shard.outs[0].dtype
    x = x.to(accumulation_dtype(dtype))
    prefix = _totals_before(shard, x.prod(dim, keepdim=True)).prod(0)
    return write_if_inplace(shard, (x.cumprod(dim) * prefix).to(dtype))


@form("logcumsumexp")
def _logcumsumexp(shard: Shards) -> Tensor:
    """Run logcumsumexp on the shard, after the logsumexp of all shards before it."""
    x, dim = widen(shard.tensors[0]), shard.call.dim()
    prefix = _totals_before(shard, x.logsumexp(dim, keepdim=True)).logsumexp(0)
    scanned = torch.cat([prefix, x], dim).logcumsumexp(dim).narrow(dim, 1, x.shape[dim])
    return write_if_inplace(shard, scanned.to(shard.outs[0].dtype))


@form("cummax_or_cummin")
def _cummax_or_cummin(shard: Shards) -> Any:
    """Run cummax or cummin.

    Among equal numbers the last index counts, and NaN wins, as in torch.
    """
    x, dim, is_max = shard.tensors[0], shard.call.dim(), shard.call.name == "cummax"
    scan, scan_index = shard.run(x, dim)
    scan_index = scan_index + shard.region()[0][dim]
    # Scan the ranks' last values up to the previous rank. The first rank does not use the result.
    lasts, places = (stack(shard, each) for each in _last_of_scan(x, scan, scan_index, dim, is_max))
    me = index_and_count(shard)[0]
    best, winner = (each[max(me - 1, 0)] for each in shard.run(lasts, 0))
    place = places.gather(0, winner.unsqueeze(0)).squeeze(0)
    wins = scan >= best if is_max else scan <= best
    keeps_own = (wins | scan.isnan()) & ~(best.isnan() & ~scan.isnan()) if me else wins | True
    values, indices = torch.where(keeps_own, scan, best), torch.where(keeps_own, scan_index, place)
    return getattr(torch.return_types, shard.call.name)((values, indices))


def _last_of_scan(
    x: Tensor, scan: Tensor, scan_index: Tensor, dim: int, is_max: bool
) -> tuple[Tensor, Tensor]:
    """Return (last value of this rank's scan, its index), from which later ranks start.

    An empty shard gives the identity of the scan (-inf for a maximum) and index 0.
    """
    if x.shape[dim]:
        return scan.narrow(dim, -1, 1), scan_index.narrow(dim, -1, 1)
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    value = x.new_full(shape, identity(x.dtype, "max" if is_max else "min"))
    if x.is_floating_point():  # adds 0; keeps a graph whose backward joins the collectives
        value = value + x.sum(dim, keepdim=True)
    return value, x.new_zeros(shape, dtype=torch.int64)


@form("trapezoid")
def _trapezoid(shard: Shards) -> Tensor:
    """Sum the shard's values with the weights of the trapezoid rule.

    The weight of a point is half of the distance from the point before it to the point after it.
    """
    y, dim, n = shard.tensors[0], shard.call.dim("dim", -1), shard.specs[0].shape
    start, size = (side[dim] for side in shard.region())
    if len(shard.tensors) > 1:
        x = shard.tensors[1].movedim(dim, -1) if shard.tensors[1].ndim > 1 else shard.tensors[1]
        steps = x.diff()
    else:
        steps = y.new_full((n[dim] - 1,), shard.get("dx", 1), dtype=shard.outs[0].dtype)
    weights = (F.pad(steps, (1, 0)) + F.pad(steps, (0, 1))) / 2
    weighted = widen(y).movedim(dim, -1) * widen(weights).narrow(-1, start, size)
    return sum_addends(shard, weighted.sum(-1))
