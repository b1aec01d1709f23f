"""Rules of ops whose output length depends on values: nonzero, masked_select, unique, bincount.

Each rank works on its own elements. Its results stay split, balanced by moving a few rows, or are
joined if equal values have to be merged. ``x[mask]`` is one of these ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....spec import B, P, S, Sbp
from ...signature import Call, Operand, Out, Signature
from ...table import Row, add_rows

FORM = "select_by_mask"


def _data_dependent_out(sizes: Sequence[int], dtype: torch.dtype) -> Out:
    return Out(torch.Size(sizes), dtype, data_dependent=True)


# -- elements where a mask is True -----------------------------------------------------------------


def operand_and_mask(call: Call) -> tuple[Operand, Operand] | None:
    """Return (x, mask) if the call reads or writes ``x[mask]`` with a boolean mask, or None.

    The shape of the mask must be that of the leading dims of x.
    """
    x = call.operands[0]
    if call.name in ("getitem", "setitem"):
        index: Any = call.args[1]
    else:
        index_names = [name for name in ("indices", "mask") if name in call.params]
        index = call.get(index_names[0]) if index_names else None  # narrow, select, slice have none
    if isinstance(index, tuple | list) and len(index) == 1:
        (index,) = index
    if not isinstance(index, Operand) or index.spec.dtype is not torch.bool or not index.ndim:
        return None
    # The mask of masked_select broadcasts from the right, that of x[mask] is of the first dims.
    mask_ndim = x.ndim if call.name == "masked_select" else index.ndim
    return (x, index) if tuple(x.shape[:mask_ndim]) == tuple(index.shape) else None


def masked_select_outs(call: Call) -> list[Out] | None:
    """Return the output of ``x[mask]`` at its largest possible size; None for other calls.

    It has one row of x for each True, and at most one for each element of the mask.
    """
    x_and_mask = operand_and_mask(call)
    if x_and_mask is None:
        return None
    x, mask = x_and_mask
    return [_data_dependent_out((mask.shape.numel(), *x.shape[mask.ndim :]), x.spec.dtype)]


def masked_select(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of masked_select and x[mask]: operands and result are S(0).

    Each rank selects from its own rows. As ranks then hold different numbers of selected rows, they
    send rows to each other until the split is balanced. A dim of x that the mask does not cover may
    be split instead, and needs no messages.
    """
    x_and_mask = operand_and_mask(call)
    if x_and_mask is None:
        return [call.broadcast_signature()]
    x, mask = x_and_mask
    unmasked_dims = range(mask.ndim, x.ndim)
    signatures = [
        call.broadcast_signature(),
        *(call.new_signature({0: S(d)}, S(d - mask.ndim + 1), FORM) for d in unmasked_dims),
    ]
    signatures.append(
        call.new_signature({0: S(0), mask.index: S(0)}, S(0), FORM, _balancing_bytes(call, parts))
    )
    return signatures


def _balancing_bytes(call: Call, parts: int) -> int:
    """Return the estimated bytes that a rank sends to balance the found rows over the ranks.

    The true number of rows is not known when layouts are chosen. The estimate assumes that half of
    all elements are found and that a rank sends half of its balanced piece of the found rows, plus
    8 bytes for the count of rows of every other rank.
    """
    nbytes = sum(out.shape.numel() * out.dtype.itemsize for out in call.outs)
    return 8 * (parts - 1) + nbytes // (4 * parts)


def nonzero_outs(call: Call) -> list[Out] | None:
    """Return the outputs of nonzero, argwhere and ``where(condition)``, at their largest size.

    They are a row of indices for each element of the input, or with ``as_tuple`` a vector for each
    dim. None for ``where(condition, x, y)``.
    """
    x = call.operands[0]
    if call.name == "where" and (len(call.args) > 1 or call.kwargs):
        return None
    if call.name == "where" or call.kwargs.get("as_tuple", False):
        return [_data_dependent_out((x.shape.numel(),), torch.int64)] * max(x.ndim, 1)
    return [_data_dependent_out((x.shape.numel(), x.ndim), torch.int64)]


def nonzero(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of nonzero and argwhere: ``S(0) -> S(0)``.

    Each rank searches its own rows. Its results follow those of the ranks before it, and are then
    balanced over the ranks.
    """
    x = call.operands[0]
    if not x.ndim:
        return [call.broadcast_signature()]
    return [
        call.broadcast_signature(),
        call.new_signature({0: S(0)}, S(0), "nonzero", _balancing_bytes(call, parts)),
    ]


# -- values ----------------------------------------------------------------------------------------


def unique_outs(call: Call) -> list[Out]:
    """Return the outputs (values, inverse, counts) of unique, of the largest possible size.

    Outputs that the call does not request have size 0, as in torch.
    """
    x = call.operands[0]
    inverse, counts = (call.get(n, False) for n in ("return_inverse", "return_counts"))
    return [
        _data_dependent_out((x.shape.numel(),), x.spec.dtype),
        _data_dependent_out(x.shape if inverse else (0,), torch.int64),
        _data_dependent_out((x.shape.numel() if counts else 0,), torch.int64),
    ]


def unique(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of unique: ``S(d) -> B, S(d), B`` for values, inverse and counts.

    Ranks exchange the unique values of their shards. The inverse is split like the input, if the
    call requests it.
    """
    x = call.operands[0]
    nbytes = (parts - 1) * x.spec.nbytes // parts
    signatures = [call.broadcast_signature()]
    for d in range(x.ndim):
        inverse: Sbp = S(d) if call.outs[1].shape == x.shape else B
        signatures.append(call.new_signature({0: S(d)}, (B, inverse, B), "unique", nbytes))
    return signatures


def bincount_outs(call: Call) -> list[Out]:
    """Return the output of bincount, whose length depends on the largest value.

    It is an int64 vector of counts, or a vector of floating-point sums if there are weights.
    """
    weights = call.get("weights")
    dtype = torch.int64
    if isinstance(weights, Operand):
        dtype = weights.spec.dtype if weights.spec.dtype is torch.float32 else torch.float64
    return [_data_dependent_out((max(call.get("minlength", 0), 1),), dtype)]


def bincount(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of bincount: ``S(0) -> P``, as each rank counts its own elements.

    Weights are split like the input. Ranks first agree on the length of the result, which depends
    on the largest value on any rank.
    """
    weights = call.get("weights")
    ins: dict[int, Sbp] = {
        o.index: S(0) for o in (call.operands[0], weights) if isinstance(o, Operand)
    }
    return [call.broadcast_signature(), call.new_signature(ins, P, "bincount", 8)]


ROWS = (
    Row("_unique2", unique, "input sorted return_inverse return_counts", outs=unique_outs),
    Row("argwhere nonzero", nonzero, "input", outs=nonzero_outs),
    Row("bincount", bincount, "input weights minlength", outs=bincount_outs),
    Row("masked_select", masked_select, "input mask", outs=masked_select_outs),
)

add_rows(ROWS)
