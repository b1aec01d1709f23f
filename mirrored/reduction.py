"""Combines the ranks' pieces in order of rank, so that every rank gets the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

# Dtypes without arithmetic in torch, gloo or NCCL, and the wider dtype in which they are combined.
WIDER_DTYPES = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}

# Sums of low-precision floats would lose bits at each step; keep them in float32 until the end.
_ACCUMULATION_DTYPES = {
    **WIDER_DTYPES,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}

# Dtypes that `ordered_reduce` accepts.
_REDUCIBLE_DTYPES = _ACCUMULATION_DTYPES.keys() | {
    torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint64,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def ordered_reduce(pieces: Sequence[Tensor], op: str = "sum", out: Tensor | None = None) -> Tensor:
    """Return the elementwise ``op`` of equal-shaped ``pieces``, combined first to last.

    The result is a new tensor, or uses the memory of ``out`` where that is possible. ``out`` may be
    one of the first two pieces. A NaN in any piece makes the result NaN. For bool, "sum" and "max"
    are "or", "min" is "and". Raises ValueError for complex numbers unless ``op`` is "sum".
    """
    dtype = pieces[0].dtype
    if dtype.is_complex and op != "sum":
        raise unordered_error(dtype, op)
    if dtype == torch.bool:
        op = "min" if op == "min" else "max"
    if dtype == torch.uint64:  # torch has no arithmetic of its own for it
        return _to_unsigned(ordered_reduce([_to_signed(piece, op) for piece in pieces], op), op)
    wide_dtype = accumulation_dtype(dtype)
    wide_pieces = (piece.detach().to(wide_dtype) for piece in pieces)
    first, second = next(wide_pieces), next(wide_pieces, None)
    if second is None:
        return first.to(dtype, copy=True)
    if op == "sum":
        # Adding the first two into a new tensor saves a pass over memory, compared with a copy to
        # which all pieces are added.
        total = torch.add(first, second, out=out if wide_dtype is dtype else None)
        for piece in wide_pieces:
            total += piece
    else:
        # Unlike fmax and fmin, these propagate NaN.
        fold = torch.maximum if op == "max" else torch.minimum
        total = reduce(fold, wide_pieces, fold(first, second))
    return total.to(dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are summed before the result is rounded.

    It is float32 for bfloat16, float16 and float8, int32 for int16, and ``dtype`` for most others.
    """
    return _ACCUMULATION_DTYPES.get(dtype, dtype)


def _to_signed(x: Tensor, op: str) -> Tensor:
    """Map uint64 to int64 so that reducing the results by ``op`` gives the right bits.

    Sums have the same bits either way. For "max" and "min" flipping the top bit keeps the order.
    """
    x = x.contiguous().view(torch.int64)
    return x if op == "sum" else x ^ torch.iinfo(torch.int64).min


def _to_unsigned(x: Tensor, op: str) -> Tensor:
    """Undo ``_to_signed``: map int64 back to uint64."""
    return _to_signed(x, op).view(torch.uint64)


def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raise ValueError if ``ordered_reduce`` cannot combine numbers of ``dtype`` by ``op``."""
    if dtype not in _REDUCIBLE_DTYPES:
        raise ValueError(
            f"all_reduce: op={op!r} was asked of {dtype} numbers.\n"
            "  torch has no arithmetic for them.\n"
            "  Convert them to a dtype that it can add, such as x.to(torch.float32)."
        )
    if dtype.is_complex and op != "sum":
        raise unordered_error(dtype, op)


def identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """Return the neutral element of ``op``, which leaves any number of ``dtype`` unchanged.

    It is 0 for "sum", and the smallest and the largest number of ``dtype`` for "max" and "min".
    """
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def unordered_error(dtype: torch.dtype, op: str) -> ValueError:
    """Return the error for a "max" or "min" of complex numbers."""
    return ValueError(
        f"all_reduce: op={op!r} was asked of {dtype} numbers.\n  They have no order.\n"
        "  Reduce their absolute values, or the real and imaginary parts one by one."
    )
