"""Ops that can be done in the same pass as the sum that boxes their first operand from P to S."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..boxing.plan import plan
from ..boxing.steps import Move
from ..spec import P, TensorSpec
from .signature import Call, Operand

FORM = "after_sum"
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def joins_sum(
    call: Call, specs: Sequence[TensorSpec], boxed: Sequence[TensorSpec]
) -> tuple[int, ...] | None:
    """The axes on which ``call`` and the boxing of its first operand, from ``specs[0]`` to
    ``boxed[0]``, are one pass; None where they are not.

    A question of specs alone, which every rank answers alike.
    """
    src, dst = specs[0], boxed[0]
    if src is dst or not call.outs or call.inplace or not _is_known(call):
        return None
    out = call.outs[0]
    alike = all(operand.spec.dtype is src.dtype for operand in call.operands)
    if not alike or src.dtype not in _SUMMED or out.dtype is not src.dtype:
        return None
    if out.shape != src.shape or src.ndim == 0:
        return None
    moves = plan(src, dst)
    last = moves[-1]
    if not isinstance(last, Move) or last.kind != "reduce_scatter" or last.src is not P:
        return None
    return tuple(a for a, (x, y) in enumerate(zip(src.sbp, dst.sbp, strict=True)) if x is not y)


def _is_known(call: Call) -> bool:
    if len(call.outs) != 1 or not (call.args and isinstance(call.args[0], Operand)):
        return False
    if call.args[0].index != 0:
        return False
    known = _KNOWN.get(call.name)
    return known is not None and known(call)


def _alone(call: Call) -> bool:
    """f(x), and keywords that are read."""
    return len(call.args) == 1 and set(call.kwargs) <= {"approximate"}


def _added(call: Call) -> bool:
    """x + y: y with one number a column, or of the shape of x."""
    if len(call.operands) != 2 or call.kwargs or not isinstance(call.args[1], Operand):
        return False
    x, y = call.operands
    return x.ndim > 0 and y.shape in (x.shape, x.shape[-1:])


def _normed(call: Call) -> bool:
    return call.operands[0].ndim > 0 and len(call.get("normalized_shape")) > 0


_KNOWN = {
    "relu": _alone,
    "gelu": _alone,
    "silu": _alone,
    "add": _added,
    "layer_norm": _normed,
    "rms_norm": _normed,
}
