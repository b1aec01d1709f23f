"""Reductions: what happens to the dims that an op looks along.

Kept dims may be split in all of them. A split reduced dim gives P where the op is a sum, and else
needs a local form that combines the ranks' small results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..spec import B, P, S, Sbp
from ..spec.sbp import partial_max, partial_min
from . import monotone
from .elementwise import split_alike
from .signature import Call, RuleFunction, Signature
from .table import Row, add_rows


def kept(call: Call, dims: Sequence[int], keepdim: bool | None = None) -> list[Signature]:
    """The whole signature, and one for each dim of the first operand that is not among ``dims``."""
    if keepdim is None:
        keepdim = bool(call.get("keepdim", False))
    made = [call.whole()]
    for d in range(call.operands[0].ndim):
        if d not in dims:
            made.append(call.make({0: S(d)}, S(d if keepdim else d - sum(r < d for r in dims))))
    return made


def across(call: Call, dims: Sequence[int], outs: Sbp, form: str | None = None) -> list[Signature]:
    """Signatures for the looked-along ``dims`` being split. A form gathers one result from each
    rank."""
    nbytes = 2 * result_bytes(call) if outs is B else 0
    return [call.make({0: S(d)}, outs, form, nbytes) for d in dims if d < call.operands[0].ndim]


def joined(call: Call, parts: int, dims: Sequence[int], form: str) -> list[Signature]:
    """The same where each rank may join but its part of the result, for a fraction of the bytes.

    With more axes another one could split what this one leaves split. A kept dim stays to meet the
    operand again, and whole."""
    made = [
        call.make({0: S(d)}, B, form, (parts - 1) * result_bytes(call))
        for d in dims
        if d < call.operands[0].ndim
    ]
    keepdim = bool(call.get("keepdim", False)) if "keepdim" in call.params else False
    shape = call.outs[0].shape
    place = max(range(len(shape)), key=lambda d: (shape[d], -d), default=0)
    if call.operands[0].spec.placement.ndim > 1 or keepdim or not shape or shape[place] < parts:
        return made
    nbytes = (parts - 1) * result_bytes(call) // parts
    return made + [call.make({0: s.ins[0]}, S(place), form, nbytes) for s in made]


def result_bytes(call: Call) -> int:
    """Bytes of all outputs."""
    return sum(o.shape.numel() * o.dtype.itemsize for o in call.outs)


def is_exact(call: Call) -> bool:
    """Whether the result's dtype holds sums of the operand's values: then addends may be reduced
    apart."""
    source, result = call.operands[0].spec.dtype, call.outs[0].dtype
    return source.is_floating_point == result.is_floating_point or not source.is_floating_point


def additive(call: Call, parts: int) -> list[Signature]:
    """sum: linear, a split reduced dim gives P."""
    dims = call.dims()
    made = kept(call, dims) + across(call, dims, P)
    return made + [call.make({0: P}, P)] if is_exact(call) else made


def counted(call: Call, parts: int) -> list[Signature]:
    """nansum and count_nonzero: a sum of something nonlinear."""
    dims = call.dims()
    keepdim = bool(call.get("keepdim", False)) if "keepdim" in call.params else False
    return kept(call, dims, keepdim) + across(call, dims, P)


def mean(call: Call, parts: int) -> list[Signature]:
    """A sum over the logical count: the local form divides by what no shard knows."""
    dims = call.dims()
    return kept(call, dims) + across(call, dims, P, "mean") + [call.make({0: P}, P)]


def by_form(form: str, apart: bool = True) -> RuleFunction:
    """A reduction whose split dims a form joins, part by part if ``apart``."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        dims = call.dims()
        made = joined(call, parts, dims, form) if apart else across(call, dims, B, form)
        return kept(call, dims) + made

    return signatures


def bounded(form: str, part: str | None = None) -> RuleFunction:
    """A largest or smallest value: a rank's own bounds it. Where gradients are asked for, the
    winner must be known, and ``form`` finds it."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        dims = call.dims()
        kind = partial_max if call.name in ("amax", "any", "max") else partial_min
        made = kept(call, dims) + across(call, dims, kind, part)
        if call.operands[0].spec.dtype is call.outs[0].dtype:
            made.append(call.make({0: kind}, kind))
        return made + joined(call, parts, dims, form)

    return signatures


def largest(call: Call, parts: int) -> list[Signature]:
    """max and min: of all elements, along one dim (with indices), or of two tensors."""
    if len(call.operands) == 2:
        return split_alike(call, parts) + monotone.of_two(call)
    dims = call.dims()
    if len(call.outs) == 1:
        return bounded("extreme", "bound")(call, parts)
    return kept(call, dims) + joined(call, parts, dims, "extreme_index")


def variance(call: Call, parts: int) -> list[Signature]:
    """var, std, and both with the mean. The second positional argument may be ``unbiased``."""
    _, dims, keepdim = spread_of(call)
    made = kept(call, dims, keepdim)
    return (
        made if call.operands[0].spec.dtype.is_complex else made + across(call, dims, B, "variance")
    )


def spread_of(call: Call) -> tuple[float, tuple[int, ...], bool]:
    """(correction, dims, keepdim) of a call of var, std, var_mean or std_mean."""
    n = call.operands[0].ndim
    first, unbiased = call.get("dim"), call.get("unbiased", True)
    if isinstance(first, bool):
        dims, unbiased = tuple(range(n)), first
    else:
        dims = call.dims()
    correction = call.kwargs.get("correction", 1 if unbiased else 0)
    return (1 if correction is None else correction), dims, bool(call.get("keepdim", False))


def norm(call: Call, parts: int) -> list[Signature]:
    """Norms of vectors, and the Frobenius norm, which is one. Others keep their dims whole."""
    order, dims = norm_of(call)
    made = kept(call, dims)
    if (
        order is None
        or order < 0
        and order != float("-inf")
        or not call.outs[0].dtype.is_floating_point
    ):
        return made
    if order in (0, 1):
        return made + across(call, dims, P)
    return made + joined(call, parts, dims, "norm")


def norm_of(call: Call) -> tuple[float | None, tuple[int, ...]]:
    """(order of the vector norm, or None for a norm of matrices; the dims it is over)."""
    dims, ndim = call.dims(), call.operands[0].ndim
    if call.name in ("norm", "linalg_vector_norm", "frobenius_norm"):
        order = 2 if call.name == "frobenius_norm" else call.get("ord", 2)
        return (
            2 if order in (None, "fro") else None if isinstance(order, str) else float(order)
        ), dims
    order = call.get("ord", "fro" if call.name == "linalg_matrix_norm" else None)
    if call.name == "linalg_matrix_norm":
        dims = tuple(d % ndim for d in call.get("dim", (-2, -1)))
    if order is None or order == "fro":
        return 2.0, dims
    return (float(order) if len(dims) == 1 and not isinstance(order, str) else None), dims


def compared(call: Call, parts: int) -> list[Signature]:
    """cosine_similarity and pairwise_distance: vectors along a dim, one number for each pair."""
    x, y = call.operands
    if x.shape != y.shape or not x.ndim:
        return [call.whole()]
    by_angle = call.name == "cosine_similarity"
    dim = call.dim("dim", 1) if by_angle else x.ndim - 1
    found = kept(call, [dim], None if not by_angle else False)
    if by_angle:
        found += [replace(s, nbytes=3 * s.nbytes) for s in joined(call, parts, [dim], "cosine")]
    return [replace(s, ins=(s.ins[0], s.ins[0])) for s in found]


def softmax(call: Call, parts: int) -> list[Signature]:
    """softmax and log_softmax: two small reductions join a split dim."""
    dim = call.dim()
    made = call.same(d for d in range(call.operands[0].ndim) if d != dim)
    rest = call.outs[0].shape.numel() // max(1, call.outs[0].shape[dim] if call.outs[0].ndim else 1)
    nbytes = min(4, parts - 1) * rest * call.outs[0].dtype.itemsize
    return made + [
        call.make({0: S(d)}, S(d), "softmax", nbytes) for d in (dim,) if d < call.operands[0].ndim
    ]


def along(call: Call, parts: int) -> list[Signature]:
    """Along one dim, which must be whole; the result has the operand's dims."""
    dim = call.dim("dim", -1)
    return call.same(d for d in range(call.operands[0].ndim) if d != dim)


def renorm(call: Call, parts: int) -> list[Signature]:
    """Each slice along ``dim`` is scaled by its own norm."""
    return call.same([call.dim()])


_DIM = "input dim keepdim"

ROWS = (
    Row("all any", bounded("truth"), _DIM, forward=True),
    Row("amax amin", bounded("extreme", "bound"), _DIM, forward=True),
    Row("aminmax", by_form("extremes", apart=False), "input _dim _keepdim dim keepdim"),
    Row("argmax argmin", by_form("extreme_index"), _DIM),
    Row("cosine_similarity", compared, "x1 x2 dim eps"),
    Row("count_nonzero", counted, "input dim"),
    Row("frobenius_norm", norm, _DIM),
    Row("glu", along, "input dim"),
    Row(
        "linalg_matrix_norm linalg_norm linalg_vector_norm norm",
        norm,
        "input ord dim keepdim",
        by_value=True,
    ),
    Row(
        "log_softmax _log_softmax softmax _softmax special_log_softmax special_softmax",
        softmax,
        "input dim",
        composite=True,
    ),
    Row("logsumexp special_logsumexp", by_form("logsumexp"), _DIM),
    Row("max min", largest, _DIM, forward=True),
    Row("mean", mean, _DIM),
    Row("nanmean", by_form("nanmean", apart=False), _DIM),
    Row("nansum", counted, _DIM),
    Row("pairwise_distance", compared, "x1 x2 p eps keepdim"),
    Row("prod", by_form("prod"), _DIM),
    Row("renorm", renorm, "input p dim"),
    Row("std std_mean var var_mean", variance, "input dim unbiased keepdim", by_value=True),
    Row("sum", additive, _DIM),
)

add_rows(ROWS)
