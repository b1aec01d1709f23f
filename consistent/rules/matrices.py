"""Functions of whole matrices: a batch of them splits, and so do the columns that a system is
solved for.

Torch's kernels take the matrices of a batch one by one, so a piece of the batch gives the same
bits. The input of a single matrix that is split is gathered: no factorization of parts is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import B, P, S
from . import notation
from .signature import Call, LocalShapes, Signature
from .table import Row, add_rows

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _read(call: Call, rule: str, partial: notation.Partial = None) -> list[Signature]:
    shapes = tuple(tuple(operand.shape) for operand in call.operands)
    return list(notation.signatures(rule, shapes, partial))


def each_matrix(call: Call, parts: int) -> list[Signature]:
    """A batch of matrices, and what goes with each of them; an output begins with the batch, or is
    empty where it was not asked for."""
    made, batch = [call.whole()], call.operands[0].shape[:-2]
    if any(operand.shape[: len(batch)] != batch for operand in call.operands):
        return made
    for d in range(len(batch)):
        outs = [S(d) if out.shape[: len(batch)] == batch else B for out in call.outs]
        made.append(call.make(dict.fromkeys(range(len(call.operands)), S(d)), outs))
    return made


def solved(call: Call, parts: int) -> list[Signature]:
    """``a x = b`` of matrices or vectors: ``...[mm], ...[m]n -> ...[m]n``, linear in b."""
    a, b = call.operands
    left = call.get("left", True)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)
    if vector and "upper" not in call.params:
        one = "...[m]"
    else:
        one = "...[m]n" if left else "...n[m]"
    if len(call.outs) > 1:  # and how it went for each matrix
        return _read(call, f"...[mm], {one} -> {one}, ...", "none")
    return _read(call, f"...[mm], {one} -> {one}", (1,))


def _spelled(call: Call, dim: int, given: str) -> tuple[list[str], str]:
    """Letters of the operands, dims lined up from the right, ``given`` at the dim ``dim``."""
    n = max(operand.ndim for operand in call.operands)
    names = list(_LETTERS[:n])
    letter = names[dim % n]
    names[dim % n] = given.replace("*", letter)
    return ["".join(names[n - operand.ndim :]) for operand in call.operands], letter


def crossed(call: Call, parts: int) -> list[Signature]:
    """cross: three numbers along a dim belong together; bilinear."""
    left, _ = _spelled(call, _crossed_dim(call), "[*]")
    return _read(call, f"{', '.join(left)} -> {max(left, key=len)}")


def _crossed_dim(call: Call) -> int:
    """Counted from the right; torch.cross takes the first of size 3 if it is not told."""
    n = call.outs[0].ndim
    dim = call.get("dim", -1 if call.name == "linalg_cross" else None)
    if dim is None:
        dim = next(d for d, size in enumerate(call.outs[0].shape) if size == 3)
    return dim if dim < 0 else dim - n


def _with_dim(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """A shard may be of size 3 elsewhere."""
    return call.operands, {"dim": _crossed_dim(call)}


def dotted(call: Call, parts: int) -> list[Signature]:
    """vecdot: a product summed along a dim."""
    n = max(operand.ndim for operand in call.operands)
    dim = call.get("dim", -1)
    left, letter = _spelled(call, dim if dim < 0 else dim - n, "*")
    return _read(call, f"{', '.join(left)} -> {max(left, key=len).replace(letter, '')}")


def chained(call: Call, parts: int) -> list[Signature]:
    """multi_dot: matrices, the first and the last may be vectors."""
    left: list[str] = []
    names = iter(_LETTERS)
    inner = next(names)
    for operand in call.operands:
        left.append(inner if operand.ndim == 1 else inner + (inner := next(names)))
    kept = left[0][:-1] + left[-1][1:]
    return _read(call, f"{', '.join(left)} -> {kept}")


def powers(call: Call, parts: int) -> list[Signature]:
    """linalg.vander: powers of each number along a new last dim, as many as the last dim has if
    ``N`` does not say."""
    n = call.operands[0].ndim
    return call.same(range(n if call.get("N") is not None else n - 1))


def multiplied(call: Call, parts: int) -> list[Signature]:
    """kron: each item of the first spans a run of the second's; pieces of the first stay runs
    where they are even."""
    a, b = call.operands
    made = [call.whole(), *_bilinear(call)]
    n, size = call.outs[0].ndim, a.spec.placement.size
    for d in range(a.ndim):
        place = n - a.ndim + d
        other = b.shape[place - n] if place - n >= -b.ndim else 1
        if a.shape[d] % size == 0 or other == 1:
            made.append(call.make({0: S(d)}, S(place)))
    for d in range(b.ndim):
        place = n - b.ndim + d
        if place - n < -a.ndim or a.shape[place - n] == 1:
            made.append(call.make({1: S(d)}, S(place)))
    return made


def _bilinear(call: Call) -> Sequence[Signature]:
    return [s for s in _read(call, "..., ... -> ...") if any(e.is_partial for e in s.ins)]


def traced(call: Call, parts: int) -> list[Signature]:
    """trace: each rank adds the part of the diagonal that it holds."""
    made = [call.whole(), call.make({0: P}, P)]
    return made + [call.make({0: S(d)}, P, "trace") for d in (0, 1)]


def full_batches(call: Call, parts: int) -> list[Signature]:
    """As ``each_matrix``, but no rank's batch is empty: of one, torch gives these a result or a
    gradient that autograd knows nothing of."""
    x = call.operands[0]
    short = [S(d) for d in range(x.ndim - 2) if x.shape[d] < x.spec.placement.size]
    return [made for made in each_matrix(call, parts) if made.ins[0] not in short]


def with_tolerances(call: Call, parts: int) -> list[Signature]:
    """pinv, matrix_rank: their tolerances may be tensors, which are then whole."""
    return [call.whole()] if len(call.operands) > 1 else each_matrix(call, parts)


_FACTORS = (
    "_linalg_eigh _linalg_svd _lu_with_info linalg_ldl_factor linalg_ldl_factor_ex linalg_lu "
    "linalg_lu_factor linalg_lu_factor_ex linalg_qr linalg_svd linalg_svdvals lu_unpack qr svd"
)
_SQUARE = (
    "cholesky cholesky_inverse inverse linalg_cholesky linalg_inv linalg_matrix_exp "
    "linalg_matrix_power matrix_exp matrix_power"
)
_NUMBERS = "det linalg_det logdet"
_SOLVES = "A B upper left unitriangular"

ROWS = (
    Row("cdist", "...m[k], ...n[k] -> ...mn", partial="none"),
    Row("chain_matmul linalg_multi_dot", chained),
    Row("cholesky_solve", "...[m]n, ...[mm] -> ...[m]n", partial=(0,)),
    Row("cross", crossed, "input other dim", localize=_with_dim),
    Row(_FACTORS, each_matrix),
    Row("kron", multiplied),
    Row("linalg_cholesky_ex linalg_inv_ex", "...[mm] -> ...[mm], ...", partial="none"),
    Row("linalg_cond linalg_householder_product orgqr", full_batches),
    Row("linalg_cross", crossed, "input other dim"),
    Row("linalg_eig linalg_eigh", "...[mm] -> ...[m], ...[mm]", partial="none"),
    Row("linalg_eigvals linalg_eigvalsh", "...[mm] -> ...[m]", partial="none"),
    Row("linalg_ldl_solve", "...[mm], ...[m], ...[m]n -> ...[m]n", partial=(2,)),
    Row("linalg_lu_solve", "...[mm], ...[m], ...[m]n -> ...[m]n", partial=(2,)),
    Row("linalg_matrix_rank linalg_pinv pinverse", with_tolerances),
    Row("linalg_slogdet slogdet", "...[mm] -> ..., ...", partial="none"),
    Row("linalg_solve linalg_solve_ex", solved, "A B left check_errors"),
    Row("linalg_solve_triangular", solved, _SOLVES),
    Row("linalg_vander", powers, "x N"),
    Row("linalg_vecdot", dotted, "x y dim"),
    Row("lu_solve", "...[m]n, ...[mm], ...[m] -> ...[m]n", partial=(0,)),
    Row(_NUMBERS, "...[mn] -> ...", partial="none"),
    Row(_SQUARE, "...[mm] -> ...[mm]", partial="none"),
    Row("trace", traced),
    Row("triangular_solve", "...[m]n, ...[mm] -> ...[m]n, ...[mm]", partial="none"),
)

add_rows(ROWS)
