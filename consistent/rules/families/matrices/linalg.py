"""Rules of functions of whole matrices: a batch of them, and columns to solve for, may be split.

Torch's kernels take the matrices of a batch one by one, so a piece of the batch gives the same
bits. A single matrix that is split is gathered: it is not factorized in parts.
"""

from __future__ import annotations

import torch

from ....spec import S
from ... import notation
from ...signature import Call, LocalShapes, Signature
from ...table import Row, add_rows

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def solve(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of linalg_solve, by `f(...[km]), ...[m]n -> ...[k]n`.

    So batches and right-hand sides n may be split, and P of the right-hand side passes, as the
    solution is linear in it. For vectors the rule is `f(...[km]), ...[m] -> ...[k]`, and with
    ``left=False`` `f(...[mk]), ...n[m] -> ...n[k]`.
    """
    a, b = call.require_operands(2)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)
    if not call.get("left", True):
        rule = "f(...[mk]), ...n[m] -> ...n[k]"
    elif vector:
        rule = "f(...[km]), ...[m] -> ...[k]"
    else:
        rule = "f(...[km]), ...[m]n -> ...[k]n"
    if len(call.outs) > 1:  # linalg_solve_ex: an info per matrix
        left, right = rule.split(" -> ")
        rule = f"f({left.replace('f(', '').replace(')', '')}) -> {right}, ..."
    return notation.signatures_of_text(rule, call, parts)


def cross_dim(call: Call) -> int:
    """Return the dim along which torch.cross works, counted from the right: -1 for ``(4, 3)``.

    If the call names none, it is the first dim of size 3.
    """
    shape, dim = torch.broadcast_shapes(*(x.shape for x in call.operands)), call.get("dim")
    if dim is None:
        dim = next(d for d, size in enumerate(shape) if size == 3)
    return dim if dim < 0 else dim - len(shape)


def with_cross_dim(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the arguments of torch.cross for the shards, with ``dim`` by name.

    Without it torch would take the first dim of size 3 of the shard, which may be another dim.
    """
    return call.operands, {"dim": cross_dim(call)}


def multi_dot(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of a product of many matrices, by `ab, bc, cd -> ad`.

    The rule has as many operands as the call. The first and the last may be vectors: `a, ab -> b`.
    """
    left: list[str] = []
    names = iter(_LETTERS)
    inner = next(names)
    for operand in call.operands:
        left.append(inner if operand.ndim == 1 else inner + (inner := next(names)))
    out_letters = left[0][:-1] + left[-1][1:]
    return notation.signatures_of_text(f"{', '.join(left)} -> {out_letters}", call, parts)


def kron(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of kron: a dim of the first operand is split if it divides evenly.

    Along a dim, item i of the first operand gives items i·m to i·m + m of the result, if the second
    has m items. Pieces of equal size then give pieces of equal size. A dim of the second operand is
    split if the first has size 1 there.
    """
    a, b = call.require_operands(2)
    signatures = [call.broadcast_signature()]
    n, size = call.outs[0].ndim, a.spec.placement.size
    for d in range(a.ndim):
        place = n - a.ndim + d
        other_size = b.shape[place - n] if place - n >= -b.ndim else 1
        if a.shape[d] % size == 0 or other_size == 1:
            signatures.append(call.new_signature({0: S(d)}, S(place)))
    for d in range(b.ndim):
        place = n - b.ndim + d
        if place - n < -a.ndim or a.shape[place - n] == 1:
            signatures.append(call.new_signature({1: S(d)}, S(place)))
    return signatures


_PIVOTED = "f(...[km], ...[m]), ...[m]n -> ...[k]n"
_SOLVED = "f(...[km]), ...[m]n -> ...[k]n"
_FACTORED = "f(...[mn]) -> ..._*"

ROWS = (
    Row("cdist", "f(...m[k], ...n[k]) -> ...mn"),
    Row("chain_matmul linalg_multi_dot", multi_dot),
    Row("cholesky_solve", "...[m]n, f(...[km]) -> ...[k]n", "input input2"),
    Row(
        "cross", "...[D], ...[D] -> ...[D]", "input other dim",
        along=lambda call: (cross_dim(call),), localize=with_cross_dim,
    ),
    Row(
        "_linalg_eigh _linalg_svd _lu_with_info linalg_ldl_factor linalg_ldl_factor_ex linalg_lu "
        "linalg_lu_factor linalg_lu_factor_ex linalg_qr linalg_svd linalg_svdvals qr svd",
        _FACTORED,
    ),
    Row("kron", kron, "input other"),
    Row("linalg_cholesky_ex linalg_inv_ex", "f(...[mm]) -> ...[mm], ..."),
    # Never empty (!): for an empty batch autograd does not track the result or the gradient.
    Row("linalg_cond", "f(...![mn]) -> ..."),
    Row("linalg_cross", "...[D], ...[D] -> ...[D]", "input other dim=-1"),
    Row("linalg_eig linalg_eigh", "f(...[mm]) -> ...[m], ...[mm]"),
    Row("linalg_eigvals linalg_eigvalsh", "f(...[mm]) -> ...[m]"),
    Row("linalg_householder_product orgqr", "f(...![mn], ...![k]) -> ...[mn]", "input input2"),
    Row("linalg_ldl_solve", _PIVOTED, "LD pivots B"),
    Row(
        "linalg_lu_solve",
        (f"{_PIVOTED}; if left", "f(...[mk], ...[m]), ...n[m] -> ...n[k]"),
        "LU pivots B left=True",
    ),
    # With tolerances that are tensors, and so operands, everything is whole.
    Row("linalg_matrix_rank linalg_pinv pinverse", (_FACTORED, "f([...]*) -> _")),
    Row("linalg_slogdet slogdet", "f(...[mm]) -> ..., ..."),
    Row("linalg_solve linalg_solve_ex", solve, "A B left check_errors"),
    Row(
        "linalg_solve_triangular",
        (f"{_SOLVED}; if left", "f(...[mk]), ...n[m] -> ...n[k]"),
        "A B upper left=True unitriangular",
    ),
    Row("linalg_vander", ("f(...) -> ...[n]; if N", "f(...[m]) -> ...[mn]"), "x N"),
    Row("linalg_vecdot", "...D, ...D -> ...", "x y dim=-1"),
    Row("lu_solve", "...[m]n, f(...[km], ...[m]) -> ...[k]n", "input LU_data LU_pivots"),
    Row("lu_unpack", "f(...[mn], ...[k]) -> ..._*", "LU_data LU_pivots"),
    Row("det linalg_det logdet", "f(...[mm]) -> ..."),
    Row(
        "cholesky cholesky_inverse inverse linalg_cholesky linalg_inv linalg_matrix_exp "
        "linalg_matrix_power matrix_exp matrix_power",
        "f(...[mm]) -> ...[mm]",
    ),
    Row("trace", ("mn -> ; mn joined by trace; if half", "mn -> ; mn by trace")),
    Row("triangular_solve", "f(...[m]n, ...[mm]) -> ...[m]n, ...[mm]", "input A"),
)  # fmt: skip

add_rows(ROWS)
