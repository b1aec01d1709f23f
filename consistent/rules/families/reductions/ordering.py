"""Rules of orderings and scans along a dim: sort, selections, running sums.

Dims other than this one stay split. If the dim itself is split, the ranks exchange sorted runs
(sort), sum histograms of the values' bytes (median, quantile), or pass on totals (cumsum). If
another dim has an item for every rank, the operand may also be boxed to a split of that dim.
"""

from __future__ import annotations

import math

from ....spec import B, P, S
from ... import notation
from ...signature import Call, Operand, Signature
from ...table import Row, add_rows


def sort(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of sort, argsort and msort: dims that are not sorted are split.

    If no other dim has an item for every rank, a split of the sorted dim stays: ranks exchange
    sorted runs of values, with the positions that they come from. Otherwise such an operand is
    boxed.
    """
    x = call.operands[0]
    dim = 0 if call.name == "msort" else call.dim("dim", -1)
    others = [d for d in range(x.ndim) if d != dim]
    signatures = call.same_split_signatures(others)
    if x.ndim and x.shape.numel() and all(x.shape[d] < parts for d in others):
        nbytes = x.shape.numel() * (x.spec.dtype.itemsize + 4) * (parts - 1) // parts**2
        signatures.append(call.new_signature({0: S(dim)}, S(dim), "sort", nbytes))
    return signatures


def quantile(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of quantile and nanquantile: any dim may be split.

    A split of a reduced dim gives B: ranks find the quantiles by summing histograms of the values'
    bytes (a radix select), as they do for medians. If ``q`` is a vector, its dim is the first of
    the result.
    """
    x, dims, q = call.operands[0], call.dims(), call.get("q")
    first = q.ndim if isinstance(q, Operand) else 0
    signatures = [call.broadcast_signature()]
    for d in range(x.ndim):
        if d in dims or x.shape[d] < x.spec.placement.size:  # torch refuses an empty shard
            continue
        place = d if call.get("keepdim", False) else d - sum(r < d for r in dims)
        signatures.append(call.new_signature({0: S(d)}, S(place + first)))
    if not x.shape.numel():
        return signatures
    nbytes = notation.digit_counts_bytes(signatures[0], call, parts)
    return signatures + [
        call.new_signature({0: S(d)}, B, "quantile", nbytes) for d in dims if d < x.ndim
    ]


def topk(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of topk: any dim may be split.

    Along the dim of topk the ranks gather the k best elements of each shard, and choose among
    these. The result is then B, or split along another dim.
    """
    x, dim = call.operands[0], call.dim()
    signatures = call.same_split_signatures(d for d in range(x.ndim) if d != dim)
    if not x.ndim or x.shape[dim] // x.spec.placement.size < call.get("k"):
        return signatures
    nbytes, shape = (parts - 1) * notation.result_bytes(call), call.outs[0].shape
    signatures.append(call.new_signature({0: S(dim)}, B, "topk", nbytes))
    place = max((d for d in range(x.ndim) if d != dim), key=lambda d: shape[d], default=None)
    if place is not None and shape[place] >= parts and x.spec.placement.ndim == 1:
        signatures.append(call.new_signature({0: S(dim)}, S(place), "topk", nbytes // parts))
    return signatures


def trapezoid(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of trapezoid, which sums along ``dim``: a split of ``dim`` gives P.

    It gives B in half precision. Other dims stay split. The points ``x``, if given, are B, or split
    as ``y`` is.
    """
    y, x = call.operands[0], call.operands[1] if len(call.operands) > 1 else None
    dim = call.dim()
    half = call.outs[0].dtype in notation.HALVES
    adds_up = not half and math.isfinite(call.kwargs.get("dx", 1))
    signatures = [call.broadcast_signature(), *([call.new_signature({0: P}, P)] if adds_up else [])]
    for d in range(y.ndim):
        splits_points = x is not None and x.shape == y.shape and d != dim
        fits = x is None or splits_points or x.ndim == 1 or (d == dim and x.shape == y.shape)
        if fits and d == dim and y.shape[d] > 1:
            signatures.append(
                call.new_signature({0: S(d)}, B if half else P, "trapezoid", 4 * half)
            )
        elif fits and d != dim:
            signatures.append(
                call.new_signature(
                    {0: S(d), **({1: S(d)} if splits_points else {})}, S(d - (d > dim))
                )
            )
    return signatures


_DIM = "input dim keepdim"
_SCAN = "input dim"
_ORDER_STATISTIC = "f(...D) -> ..., ...; D joined by order_statistic"

ROWS = (
    Row("argsort msort sort", sort, "input dim descending"),
    Row("cummax cummin", "f(...D) -> ...D, ...D; D by cummax_or_cummin", _SCAN),
    Row("cumprod", "f(...D) -> ...D; D by cumprod", _SCAN),
    Row("cumsum", ("f(...D) -> ...D; D by cumsum; if half", "...D -> ...D; D by cumsum"), _SCAN),
    Row("kthvalue", _ORDER_STATISTIC, "input k dim=-1 keepdim"),
    Row("logcumsumexp", "f(...D) -> ...D; D by logcumsumexp", _SCAN),
    Row("median nanmedian", (_ORDER_STATISTIC, "f(...D) -> ...; D joined by median_of_all"), _DIM),
    Row("mode", "f(...[D]) -> ..., ...", "input dim=-1 keepdim"),
    Row("nanquantile quantile", quantile, "input q dim keepdim interpolation"),
    Row("topk", topk, "input k dim=-1 largest sorted"),
    Row("trapezoid trapz", trapezoid, "y x dx dim=-1"),
)

add_rows(ROWS)
