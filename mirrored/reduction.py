"""Combines the ranks' pieces in the order of the ranks, so that every rank gets the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Types that torch's arithmetic, gloo or NCCL does not support are combined in a wider one.
WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}

# Sums of short floats would lose a bit at each step; keep them in float32 until the end.
_ACCUMULATE = {**WIDER, torch.float16: torch.float32, torch.bfloat16: torch.float32}


def ordered_reduce(pieces: Sequence[Tensor], op: str = "sum") -> Tensor:
    """The elementwise `op` of equal-shaped `pieces`, first to last, as a new tensor.

    A NaN in any piece makes the result NaN. For bool "sum" and "max" are "or", "min" is "and".
    Raises ValueError for complex numbers unless `op` is "sum".
    """
    dtype = pieces[0].dtype
    if dtype.is_complex and op != "sum":
        raise no_order(dtype, op)
    if dtype == torch.bool:
        op = "min" if op == "min" else "max"
    total = pieces[0].detach().to(_ACCUMULATE.get(dtype, dtype), copy=True)
    for piece in pieces[1:]:
        if op == "sum":
            total += piece.to(total.dtype)
        else:
            fold = torch.maximum if op == "max" else torch.minimum
            total = fold(total, piece.to(total.dtype))
    return total.to(dtype)


def identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """The number that changes no other when combined with it by `op`: 0 for "sum", for "max" and
    "min" the smallest and the largest number of `dtype`."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def no_order(dtype: torch.dtype, op: str) -> ValueError:
    return ValueError(
        f"all_reduce: op={op!r} was asked of {dtype} numbers.\n  They have no order.\n"
        "  Reduce their absolute values, or the real and imaginary parts one by one."
    )
