"""Rules of reductions: splits of the dims that are kept, and of the dims that are reduced.

A kept dim stays split. A split reduced dim gives P if the op is a sum, and otherwise needs a form
that joins the ranks' small results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....spec import B, P, S
from ... import notation
from ...signature import Call, Signature
from ...table import Row, add_rows


def kept_dim_signatures(
    call: Call, dims: Sequence[int], keepdim: bool | None = None
) -> list[Signature]:
    """Return the SBP signature with all tensors B, and one for each split of a dim not in ``dims``.

    For a reduction of dim 0 of a matrix: ``B -> B`` and ``S(1) -> S(0)``, with keepdim ``S(1) ->
    S(1)``. ``keepdim`` is the call's if not given.
    """
    if keepdim is None:
        keepdim = bool(call.get("keepdim", False))
    signatures = [call.broadcast_signature()]
    for d in range(call.operands[0].ndim):
        if d not in dims:
            signatures.append(
                call.new_signature({0: S(d)}, S(d if keepdim else d - sum(r < d for r in dims)))
            )
    return signatures


def joined_dim_signatures(
    call: Call, parts: int, dims: Sequence[int], form: str
) -> list[Signature]:
    """Return the SBP signatures that split one of the reduced ``dims``.

    The form ``form`` joins the ranks' results. The result is B, as ``S(0) -> B``, or split if each
    rank joins only its part of the result.
    """
    signatures = []
    for d in dims:
        if d < call.operands[0].ndim:
            whole_result = call.new_signature({0: S(d)}, B, form)
            signatures.append(
                replace(whole_result, nbytes=notation.join_bytes(whole_result, call, parts))
            )
    return signatures + [
        s
        for signature in signatures
        for s in notation.split_result_variants(signature, call, parts)
    ]


def variance_arguments(call: Call) -> tuple[float, tuple[int, ...], bool]:
    """Return (correction, dims, keepdim) of a call of var, std, var_mean or std_mean.

    The variance of n items divides by n - correction. Torch also takes ``unbiased`` in its place,
    and as the first argument in the place of ``dim``.
    """
    n = call.operands[0].ndim
    first, unbiased = call.get("dim"), call.get("unbiased", True)
    if isinstance(first, bool):
        dims, unbiased = tuple(range(n)), first
    else:
        dims = call.dims()
    correction = call.kwargs.get("correction", 1 if unbiased else 0)
    return (1 if correction is None else correction), dims, bool(call.get("keepdim", False))


def norm(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of norms: kept dims, and reduced dims of a vector norm, are split.

    If a reduced dim is split, a norm of order 0 or 1, which is a sum, is P. Other positive orders
    and the infinite ones are joined by the form "norm". Norms of matrices, but for the Frobenius
    norm, need whole matrices.
    """
    order, dims = norm_arguments(call)
    signatures = kept_dim_signatures(call, dims)
    if (
        order is None
        or order < 0
        and order != float("-inf")
        or not call.outs[0].dtype.is_floating_point
    ):
        return signatures
    if order in (0, 1) and call.outs[0].dtype not in notation.HALVES:
        return signatures + [call.new_signature({0: S(d)}, P) for d in dims]
    return signatures + joined_dim_signatures(call, parts, dims, "norm")


def norm_arguments(call: Call) -> tuple[float | None, tuple[int, ...]]:
    """Return (order, dims that are reduced) of a vector norm; the order is None for other norms.

    The Frobenius norm counts as a vector norm of order 2.
    """
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


_DIM = "input dim keepdim"
_TWO = "x1 x2"
_VALUE_AND_INDEX = ("f(...D) -> ..., ...; D joined by argmax_or_argmin",)

ROWS = (
    Row("all", "min(...D) -> ...; D joined by any_or_all", _DIM),
    Row("amax", "max(...D) -> ...; D by local_extreme; D joined by amax_or_amin", _DIM),
    Row("amin", "min(...D) -> ...; D by local_extreme; D joined by amax_or_amin", _DIM),
    Row("aminmax", "f(...D) -> ..., ...; D joined by aminmax", "input _dim _keepdim dim keepdim"),
    Row("any", "max(...D) -> ...; D joined by any_or_all", _DIM),
    Row("argmax argmin", "f(...D) -> ...; D joined by argmax_or_argmin", _DIM),
    Row(
        "cosine_similarity",
        "f(...D, ...D) -> ...; D joined by cosine_similarity",
        f"{_TWO} dim=1 eps",
    ),
    Row("count_nonzero", "f(...D) -> ...", "input dim"),
    Row("frobenius_norm", norm, _DIM),
    Row("glu", "f(...[D]) -> ...[E]", "input dim=-1"),
    Row(
        "linalg_matrix_norm linalg_norm linalg_vector_norm norm",
        norm,
        "input ord dim keepdim",
        by_value=True,
    ),
    Row(
        "log_softmax _log_softmax softmax _softmax special_log_softmax special_softmax",
        "f(...D) -> ...D; D by softmax",
        "input dim",
        composite=True,
    ),
    Row("logsumexp special_logsumexp", "f(...D) -> ...; D joined by logsumexp", _DIM),
    Row(
        "max",
        (*_VALUE_AND_INDEX, "max(...D) -> ...; D by local_extreme; D joined by amax_or_amin",
         "max(..., dim:...) -> ...", "max(..., other:...) -> ..."),
        f"{_DIM} other",
    ),
    Row("mean", ("...D -> ...; D joined by mean; if half", "...D -> ...; D by mean"), _DIM),
    Row(
        "min",
        (*_VALUE_AND_INDEX, "min(...D) -> ...; D by local_extreme; D joined by amax_or_amin",
         "min(..., dim:...) -> ...", "min(..., other:...) -> ..."),
        f"{_DIM} other",
    ),
    Row("nanmean", "f(...D) -> ...; D joined by nanmean", _DIM),
    Row("nansum", ("f(...D) -> ...; D joined by sum; if half", "f(...D) -> ..."), _DIM),
    Row("pairwise_distance", "f(...[D], ...[D]) -> ...", f"{_TWO} p eps keepdim dim=-1"),
    Row("prod", "f(...D) -> ...; D joined by prod", _DIM),
    Row("renorm", "f([...]D) -> [...]D", "input p dim"),
    Row(
        "std std_mean var var_mean",
        "f(...D) -> ...*; D joined by variance",
        "input dim unbiased keepdim",
        by_value=True,
    ),
    Row("sum", ("...D -> ...; D joined by sum; if half", "...D -> ..."), _DIM),
)  # fmt: skip

add_rows(ROWS)
