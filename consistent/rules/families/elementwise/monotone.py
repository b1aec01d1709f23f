"""Signatures of P(max) and P(min) for monotone elementwise ops, which pass or swap them.

An increasing op passes them and a decreasing op swaps them: if f increases, the largest f(x) of the
ranks is f of the largest x. A rank that does not hold the extreme may hold anything, even the
identity of max or min, an infinity. So an op has these signatures only if it is monotone over all
numbers of its dtype, infinities included, and gives NaN for NaN. That leaves out ``log`` and
``sqrt``, arithmetic of integers, which wraps around, and a second tensor in ``add``, because it may
hold the other infinity.
"""

from __future__ import annotations

import torch

from ....spec import EXTREMES, Sbp
from ....spec.sbp import partial_max, partial_min
from ...signature import Call, Operand, Signature

OPPOSITE_EXTREME: dict[Sbp, Sbp] = {partial_max: partial_min, partial_min: partial_max}

_OR_OPS = ("bitwise_or", "logical_or")


def increasing(call: Call) -> list[Signature]:
    """Return the SBP signatures ``P(max) -> P(max)`` and ``P(min) -> P(min)`` of an increasing op.

    They are for the first operand; other operands are B.
    """
    return [call.new_signature({0: kind}, kind) for kind in EXTREMES]


def decreasing(call: Call) -> list[Signature]:
    """Return the SBP signatures ``P(max) -> P(min)`` and ``P(min) -> P(max)`` of a decreasing op.

    They are for the first operand; other operands are B.
    """
    return [call.new_signature({0: kind}, OPPOSITE_EXTREME[kind]) for kind in EXTREMES]


def add_scalar(call: Call) -> list[Signature]:
    """Return the P(max) and P(min) signatures of x + c, x - c and c - x with a number c.

    The first two pass P(max), and c - x swaps it with P(min). There are none for other calls, such
    as with a tensor c.
    """
    c = _scalar_operand(call)
    if c is None or call.kwargs.get("alpha", 1) != 1:
        return []
    first = _is_scalar_first(call)
    falls = not first if call.name == "rsub" else first and call.name != "add"
    return decreasing(call) if falls else increasing(call)


def scale_by_scalar(call: Call) -> list[Signature]:
    """Return the P(max) and P(min) signatures of x * c and x / c with a number c other than 0.

    A positive c passes P(max), and a negative one swaps it with P(min).
    """
    c = _scalar_operand(call)
    divides = call.name not in ("mul", "multiply")
    if not c or call.kwargs.get("rounding_mode") or (divides and _is_scalar_first(call)):
        return []
    return decreasing(call) if c < 0 else increasing(call)


def where(call: Call) -> list[Signature]:
    """Return the P(max) and P(min) signatures of where(condition, x, y).

    x and y may both be P(max), or one of them P(max) and the other B or a number, because a value
    that is equal on all ranks is its own maximum. The same holds for P(min).
    """
    sources = [i for i in range(1, len(call.operands))]
    picks = [sources, *([i] for i in sources if len(sources) > 1)]
    return [
        call.new_signature(dict.fromkeys(pick, kind), kind) for pick in picks for kind in EXTREMES
    ]


def and_or_of_bools(call: Call) -> list[Signature]:
    """Return the P(max) and P(min) signatures of ``or`` and ``and`` of bools.

    ``x or y`` is max(x, y), and ``and`` is min. So ``or`` has ``P(max), P(max) -> P(max)``. If one
    operand is P(max) or P(min) and the other B, the result is so too, for both ops.
    """
    if any(x.spec.dtype is not torch.bool for x in call.operands):
        return []
    indices = range(len(call.operands))
    same = partial_max if call.name in _OR_OPS else partial_min
    both = [call.new_signature(dict.fromkeys(indices, same), same)]
    return both + [call.new_signature({i: kind}, kind) for i in indices for kind in EXTREMES]


def _scalar_operand(call: Call) -> float | None:
    """Return c of ``op(x, c)`` or ``op(c, x)``, where x is the only tensor; None for other calls.

    None too, if x is not floating-point, or if its dtype cannot hold c as a normal number or 0.
    """
    dtype = call.operands[0].spec.dtype
    if len(call.operands) != 1 or not dtype.is_floating_point:
        return None
    arguments = (*call.args[:2], call.kwargs.get("other"), call.kwargs.get("input"))
    scalars = [x for x in arguments if isinstance(x, int | float) and not isinstance(x, bool)]
    limits = torch.finfo(dtype)
    if len(scalars) != 1 or not (scalars[0] == 0 or limits.tiny <= abs(scalars[0]) <= limits.max):
        return None
    return float(scalars[0])


def _is_scalar_first(call: Call) -> bool:
    return bool(call.args) and not isinstance(call.args[0], Operand)
