"""Candidate SBP signatures of a call: those of the op's rule that the call may use.

A signature may be excluded because of dtypes, gradients, or operands that are already partial.
"""

from __future__ import annotations

from ..spec import Placement, fits_dtype, has_one_partial_kind
from . import table
from .cuts import with_cuts
from .signature import Call, DoesNotFit, Signature


def candidates(row: table.Row, call: Call, placement: Placement) -> list[list[Signature]] | None:
    """Return for each axis of ``placement`` the signatures that ``call`` may use.

    ``choose`` takes one of each. None if the rule of ``row`` does not fit the call: the op then
    runs on B operands, and every rank computes all of it.
    """
    by_axis = []
    for axis in range(placement.ndim):
        call.axis = axis  # for rules that look at the present layout of operands
        try:
            options = row.signatures(call, placement.shape[axis])
        except DoesNotFit:
            return None
        if any(operand.spec.layout.is_cut for operand in call.operands):
            options = with_cuts(options, row, call, placement, axis)
        by_axis.append([o for o in options if is_allowed(o, call, axis)])
    return by_axis


def is_allowed(option: Signature, call: Call, axis: int) -> bool:
    """Return whether ``call`` may use the signature ``option`` on placement axis ``axis``.

    Only partial values (P, P(max), P(min)) can exclude it:

    * A dtype may have no such value: bools have no P, complex numbers no P(max).
    * An operand must be partial in one way over all axes: P and P(max) exclude each other.
    * P(max) and P(min) are excluded if gradients are needed, and as inputs unless some operand has
      them on this axis already.
    """
    if not any(s.is_partial for s in option.ins) and not any(s.is_partial for s in option.outs):
        return True
    operand_sbps = [o.spec.sbp for o in call.operands]
    for s in option.ins:
        if s.is_extreme and all(h[axis] is not s for h in operand_sbps):
            return False
    pairs = [(o.spec.dtype, s) for o, s in zip(call.operands, option.ins, strict=True)]
    pairs += [(o.dtype, s) for o, s in zip(call.outs, option.outs, strict=True)]
    if not all(fits_dtype(s, dtype) for dtype, s in pairs if s.is_partial):
        return False
    if call.tracked and any(s.is_extreme for _, s in pairs):
        return False
    return all(
        has_one_partial_kind((*h[:axis], s, *h[axis + 1 :]))
        for h, s in zip(operand_sbps, option.ins, strict=True)
        if s.is_partial
    )
