"""The signatures that a call may be boxed into: what the row claims, less what dtypes, gradients
and the ways in which operands are partial already rule out."""

from __future__ import annotations

from ..rules import table
from ..rules.signature import Call, Signature
from ..spec import Placement, is_one_way, may_be


def candidates(row: table.Row, call: Call, placement: Placement) -> list[list[Signature]] | None:
    """For each axis of ``placement`` the signatures that the row claims for ``call``; None where
    it does not fit."""
    by_axis = []
    for axis in range(placement.ndim):
        call.axis = axis
        try:
            options = row.signatures(call, placement.shape[axis])
        except (IndexError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return None  # the row does not fit this call
        by_axis.append([o for o in options if is_allowed(o, call, axis)])
    return by_axis


def is_allowed(option: Signature, call: Call, axis: int) -> bool:
    """Whether the dtypes can be what ``option`` says, and the operands go there in one way of
    being partial. P(max) and P(min) are made where no gradient is asked, and go on from an operand
    that is so."""
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
