"""The signatures that a call may be boxed into: those that the row claims, without those that
dtypes, gradients and operands that are already partial rule out."""

from __future__ import annotations

from ..spec import Placement, is_one_way, may_be
from . import table
from .cuts import with_cuts
from .signature import Call, DoesNotFit, Signature


def candidates(row: table.Row, call: Call, placement: Placement) -> list[list[Signature]] | None:
    """For each axis of ``placement`` the signatures that the row claims for ``call``; None where
    it does not fit."""
    by_axis = []
    for axis in range(placement.ndim):
        call.axis = axis
        try:
            options = row.signatures(call, placement.shape[axis])
        except DoesNotFit:
            return None
        if any(operand.spec.layout.is_cut for operand in call.operands):
            options = with_cuts(options, row, call, placement, axis)
        by_axis.append([o for o in options if is_allowed(o, call, axis)])
    return by_axis


def is_allowed(option: Signature, call: Call, axis: int) -> bool:
    """Whether the dtypes allow the SBPs of ``option``, and each operand is then partial in one way.
    P(max) and P(min) are allowed where no gradient is asked for, and as inputs only where an
    operand has them already."""
    if not any(s.is_partial for s in option.ins) and not any(s.is_partial for s in option.outs):
        return True
    have = [o.spec.sbp for o in call.operands]
    for s in option.ins:
        if s.is_extreme and all(h[axis] is not s for h in have):
            return False
    pairs = [(o.spec.dtype, s) for o, s in zip(call.operands, option.ins, strict=True)]
    pairs += [(o.dtype, s) for o, s in zip(call.outs, option.outs, strict=True)]
    if not all(may_be(s, dtype) for dtype, s in pairs if s.is_partial):
        return False
    if call.tracked and any(s.is_extreme for _, s in pairs):
        return False
    return all(
        is_one_way((*h[:axis], s, *h[axis + 1 :]))
        for h, s in zip(have, option.ins, strict=True)
        if s.is_partial
    )
