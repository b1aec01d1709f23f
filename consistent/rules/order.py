"""Orderings and scans along a dim: sort, selections, running sums.

Other dims may be split in all of them. Where the dim itself is split the ranks exchange runs, count
bytes, or pass on totals; where another dim has room, a split may also move there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import B, P, S
from .reduce import along, is_exact, kept, result_bytes
from .signature import Call, Operand, RuleFunction, Signature
from .table import Row, add_rows


def scan(form: str, linear: bool) -> RuleFunction:
    """Scans: a shard continues from the totals of the shards before it."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        made = along(call, parts)
        ndim = call.operands[0].ndim
        if ndim:
            dim = call.dim()
            nbytes = (parts - 1) * result_bytes(call) // max(1, call.outs[0].shape[dim])
            made.append(call.make({0: S(dim)}, S(dim), form, nbytes))
        return made + [call.make({0: P}, P)] if linear and is_exact(call) else made

    return signatures


def ordered(call: Call, parts: int) -> list[Signature]:
    """sort, argsort, msort. Another dim takes the split over; where none has an item for every
    rank, runs are exchanged instead, with the places that they come from."""
    x = call.operands[0]
    dim = 0 if call.name == "msort" else call.dim("dim", -1)
    others = [d for d in range(x.ndim) if d != dim]
    made = call.same(others)
    if x.ndim and x.shape.numel() and all(x.shape[d] < parts for d in others):
        nbytes = x.shape.numel() * (x.spec.dtype.itemsize + 4) * (parts - 1) // parts**2
        made.append(call.make({0: S(dim)}, S(dim), "sort", nbytes))
    return made


def mode(call: Call, parts: int) -> list[Signature]:
    """The most frequent element along a whole dim."""
    return kept(call, call.dims("dim", -1))


def selecting(call: Call, parts: int) -> list[Signature]:
    """median, kthvalue: one element along a dim, or of all. If it is split, the ranks count the
    bytes of their elements, 256 counts for each byte of a result."""
    along_dim = len(call.outs) > 1
    dims = call.dims("dim", -1 if along_dim else None)
    return kept(call, dims) + _selected(call, parts, dims, "ranked" if along_dim else "middle")


def quantile(call: Call, parts: int) -> list[Signature]:
    """quantile, nanquantile: selected likewise; the quantiles come first in the result."""
    x, dims, q = call.operands[0], call.dims(), call.get("q")
    first = q.ndim if isinstance(q, Operand) else 0
    made = [call.whole()]
    for d in range(x.ndim):
        if d in dims or x.shape[d] < x.spec.placement.size:  # torch refuses an empty shard
            continue
        place = d if call.get("keepdim", False) else d - sum(r < d for r in dims)
        made.append(call.make({0: S(d)}, S(place + first)))
    return made + _selected(call, parts, dims, "quantile")


def _selected(call: Call, parts: int, dims: Sequence[int], form: str) -> list[Signature]:
    x = call.operands[0]
    if not x.shape.numel():
        return []
    each = call.outs[0].shape.numel() * 256 * 8 * x.spec.dtype.itemsize
    nbytes = 2 * (parts - 1) * each // parts
    return [call.make({0: S(d)}, B, form, nbytes) for d in dims if d < x.ndim]


def largest_few(call: Call, parts: int) -> list[Signature]:
    """topk. Split along its dim, each rank offers its own k, and they are joined part by part."""
    made, x, dim = along(call, parts), call.operands[0], call.dim("dim", -1)
    if not x.ndim or x.shape[dim] // x.spec.placement.size < call.get("k"):
        return made
    nbytes, shape = (parts - 1) * result_bytes(call), call.outs[0].shape
    made.append(call.make({0: S(dim)}, B, "topk", nbytes))
    place = max((d for d in range(x.ndim) if d != dim), key=lambda d: shape[d], default=None)
    if place is not None and shape[place] >= parts and x.spec.placement.ndim == 1:
        made.append(call.make({0: S(dim)}, S(place), "topk", nbytes // parts))
    return made


def trapezoid(call: Call, parts: int) -> list[Signature]:
    """trapezoid: a sum along ``dim`` with weights that each rank knows. The points ``x``, if given,
    are B or as ``y`` is."""
    y, x = call.operands[0], call.operands[1] if len(call.operands) > 1 else None
    dim = call.dim("dim", -1)
    made = [call.whole(), call.make({0: P}, P)]
    for d in range(y.ndim):
        alike = x is not None and x.shape == y.shape and d != dim
        fits = x is None or alike or x.ndim == 1 or (d == dim and x.shape == y.shape)
        if fits and d == dim and y.shape[d] > 1:
            made.append(call.make({0: S(d)}, P, "trapezoid"))
        elif fits and d != dim:
            made.append(call.make({0: S(d), **({1: S(d)} if alike else {})}, S(d - (d > dim))))
    return made


_DIM = "input dim keepdim"

ROWS = (
    Row("argsort msort sort", ordered, "input dim descending"),
    Row("cummax cummin", scan("cumextreme", False), "input dim"),
    Row("cumprod", scan("cumprod", False), "input dim"),
    Row("cumsum", scan("cumsum", True), "input dim"),
    Row("kthvalue", selecting, "input k dim keepdim"),
    Row("logcumsumexp _logcumsumexp", scan("logcumsumexp", False), "input dim"),
    Row("median nanmedian", selecting, _DIM),
    Row("mode", mode, _DIM),
    Row("nanquantile quantile", quantile, "input q dim keepdim interpolation"),
    Row("topk", largest_few, "input k dim largest sorted"),
    Row("trapezoid trapz", trapezoid, "y x dx dim"),
)

add_rows(ROWS)
