"""Ops that may raise because of values, and whether some ranks may raise while others do not.

An op on shards raises on the rank whose shard holds what torch refuses: a singular matrix, an index
out of range, a probability above 1. Where ranks may differ, they agree on the outcome after the op
(``dispatch/running/agreed.py``). They cannot differ if the operand that decides is broadcast, so
that all have the same values, and no rank has an empty shard, in which torch looks at no value.
Both follow from the call and its specs alone, never from values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..spec import B, Layout, NdSbp, Placement
from .signature import Call, Operand, operands_in

# Ops for which the values of all operands decide.
_DECIDED_BY_ALL = frozenset(
    """cholesky linalg_cholesky cholesky_inverse inverse linalg_inv linalg_pinv pinverse linalg_cond
    matrix_power linalg_matrix_power linalg_matrix_rank linalg_solve linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh _linalg_eigh _linalg_svd linalg_svd linalg_svdvals svd
    linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lu_factor lu_solve
    linalg_lu_solve lu_unpack bernoulli binomial multinomial normal poisson binary_cross_entropy
    bincount histc histogram one_hot""".split()
)
# Ops for which the second operand decides: an index, a target.
_DECIDED_BY_SECOND = frozenset(
    """embedding index_select gather take take_along_dim put index_add index_copy index_fill
    index_reduce scatter scatter_add scatter_reduce cross_entropy_loss nll_loss nll_loss2d
    nll_loss_nd multi_margin_loss multilabel_margin_loss max_unpool2d max_unpool3d quantile
    nanquantile repeat_interleave""".split()
)
# Ops for which all operands but the first decide.
_DECIDED_BY_REST = frozenset(
    "embedding_bag index index_put masked_scatter ctc_loss searchsorted".split()
)
# Ops for which the tensors in the brackets decide.
_DECIDED_BY_SUBSCRIPT = frozenset("getitem setitem".split())
# The divisor decides, and only where it is an integer.
DIVISIONS = frozenset("floor_divide remainder fmod div divide".split())
# Ops that check only if the call says so (``check_errors=True``).
_CHECKED_ON_REQUEST = frozenset(
    """linalg_cholesky_ex linalg_inv_ex linalg_ldl_factor_ex linalg_lu_factor_ex
    linalg_solve_ex""".split()
)
_NORMS = frozenset("linalg_norm linalg_matrix_norm norm".split())
# Other aten ops that run inside one of the above, and raise in its place.
_INNER_OPS = frozenset(
    """_assert_async _linalg_solve_ex _linalg_check_errors _ctc_loss _embedding_bag
    _embedding_bag_forward_only cross_entropy_loss nll_loss_forward nll_loss2d_forward
    multilabel_margin_loss_forward""".split()
)
# Complex eigenvectors and singular vectors are determined up to a phase. Their backward raises for
# a gradient that depends on the phase, and so for NaN and infinity; the backward of eigenvalues and
# singular values raises so when it is differentiated again.
_PHASE_DEPENDENT = _NORMS | frozenset(
    """linalg_eig linalg_eigh _linalg_eigh linalg_eigvals linalg_eigvalsh linalg_svd _linalg_svd svd
    linalg_svdvals linalg_cond""".split()
)
# With ``create_graph`` backward solves with a matrix that forward accepted although it is singular.
_SOLVED_IN_BACKWARD = frozenset("logdet slogdet linalg_slogdet linalg_solve_ex".split())
# Backward of a determinant solves, too, or takes singular vectors of a singular matrix.
_DETERMINANTS = frozenset("det linalg_det".split())
# Products of several items have no second derivative where two of them are zero.
_PRODUCTS = frozenset("index_reduce scatter_reduce".split())
IN_BACKWARD = _PHASE_DEPENDENT | _SOLVED_IN_BACKWARD | _DETERMINANTS | _PRODUCTS
_LOOK_UPS = _DECIDED_BY_SECOND | _DECIDED_BY_REST | _DECIDED_BY_SUBSCRIPT
OPS = _DECIDED_BY_ALL | _LOOK_UPS | DIVISIONS | _CHECKED_ON_REQUEST | _NORMS


def raises_inside(name: str) -> bool:
    """Return whether the aten op ``name``, without a trailing underscore, may raise for values.

    Compiled steps call it for each op that they run. Some of these ops run inside an op of the
    program and raise in its place, as ``_linalg_check_errors`` inside ``linalg.inv``.
    """
    return name in _INNER_OPS or name in OPS


def may_raise(call: Call, placement: Placement) -> bool:
    """Return whether ``call`` may raise for the values of its operands, on this type of device.

    ``linalg.inv(x)`` may, for a singular matrix; an index out of range raises only on the CPU.
    """
    name = call.name
    if name not in OPS or not _arguments_may_raise(call):
        return False
    # On a GPU division by zero does not raise, and an index out of range ends the process.
    return placement.type == "cpu" or name not in _LOOK_UPS | DIVISIONS


def may_differ(call: Call, ins: Sequence[NdSbp], by_form: bool, placement: Placement) -> bool:
    """Return whether ``call`` may raise on some ranks and not on others, so that ranks must agree.

    They may differ if an operand whose values decide is split or partial, or if some ranks have an
    empty shard and others have not.

    Args:
        ins: the nd-sbps of the operands when the op runs.
        by_form: whether a form runs the op. A form may look only at this rank's part of a boolean
            mask, although every rank has the whole mask.
    """
    if not may_raise(call, placement):
        return False
    if _has_some_empty_shards(call, ins, placement):
        return True
    deciding = _deciding_operands(call)
    if by_form and any(call.operands[i].spec.dtype is torch.bool for i in deciding):
        deciding = range(len(ins))
    return any(_differs_between_ranks(ins[i], placement) for i in deciding)


def may_differ_in_backward(call: Call, ins: Sequence[NdSbp], placement: Placement) -> bool:
    """Return whether the backward of ``call`` may raise on some ranks and not on others.

    ``ins`` are the nd-sbps of the operands. Example: ``linalg.eig`` of equal matrices on all ranks,
    whose gradients differ between ranks while they are P.
    """
    if call.name in _PRODUCTS and "prod" not in (*call.args, *call.kwargs.values()):
        return False
    if call.name in _SOLVED_IN_BACKWARD | _DETERMINANTS | _PRODUCTS and (
        any(_differs_between_ranks(sbp, placement) for sbp in ins)
        or _has_some_empty_shards(call, ins, placement)
    ):
        return True
    if (
        call.name not in _PHASE_DEPENDENT | _DETERMINANTS
        or placement.size == 1
        or not _arguments_may_raise(call)
    ):
        return False
    # Gradients may differ between ranks even if values do not, because they may be P.
    gives_complex = call.name in ("linalg_eig", "linalg_eigvals")
    return gives_complex or any(operand.spec.dtype.is_complex for operand in call.operands)


def _has_some_empty_shards(call: Call, ins: Sequence[NdSbp], placement: Placement) -> bool:
    """Return whether a rank has an empty shard of an operand while others have not.

    On an empty shard torch checks no index and divides by no zero, so that rank does not raise.
    """
    return any(
        Layout.of(placement, sbp).has_empty_shards(operand.shape)
        for operand, sbp in zip(call.operands, ins, strict=True)
    )


def _deciding_operands(call: Call) -> Sequence[int]:
    """Return the indices of the operands whose values decide whether the op raises.

    Of ``gather(x, 0, index)`` it is 1: the index may be out of range, and any x will do.
    """
    name, count = call.name, len(call.operands)
    if name in _DECIDED_BY_SECOND:
        return range(1, 2)
    if name in _DECIDED_BY_REST:
        return range(1, count)
    if name in _DECIDED_BY_SUBSCRIPT:
        return [operand.index for operand in operands_in(call.args[1:2])]
    return range(count - 1, count) if name in DIVISIONS else range(count)


def _arguments_may_raise(call: Call) -> bool:
    """Return whether this call of an op in OPS may raise, judged by its arguments.

    ``div(x, 2)`` may not; ``div(x, y, rounding_mode="floor")`` may, if y holds integer zeros.
    """
    if call.name in _DECIDED_BY_SECOND and len(call.operands) < 2:
        return False  # quantile(x, 0.5)
    if call.name in ("div", "divide") and call.kwargs.get("rounding_mode") is None:
        return False
    if call.name in DIVISIONS:
        divisor = [*call.args, *call.kwargs.values()][1]
        return isinstance(divisor, Operand) or divisor == 0
    if call.name in _CHECKED_ON_REQUEST:
        return any(x is True for x in (*call.args, *call.kwargs.values()))
    if call.name in _DECIDED_BY_SUBSCRIPT:
        return bool(operands_in(call.args[1:2]))
    if call.name in _NORMS:
        return any(
            x in ("nuc", 2, -2) for x in (*call.args, *call.kwargs.values()) if _is_norm_order(x)
        )
    return True


def _is_norm_order(x: object) -> bool:
    return isinstance(x, str | int | float) and not isinstance(x, bool)


def _differs_between_ranks(sbp: NdSbp, placement: Placement) -> bool:
    """Return whether ranks of ``placement`` have different values of a tensor with this nd-sbp."""
    return any(e is not B and n > 1 for e, n in zip(sbp, placement.shape, strict=True))
