"""Padding of convolutions and pooling, named "SAME" and "VALID" as in OneFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) from one number for both dims, or from a sequence of two numbers."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def pad_same(
    x: Any,
    padding: str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    value: float = 0.0,
) -> tuple[Any, tuple[int, int]]:
    """Return (``x``, the ``padding=`` argument of torch's op), which together do ``padding``.

    "VALID" adds no padding. "SAME" gives ``ceil(n / stride)`` outputs. torch's argument adds the
    same number on both sides of a dim. If a dim needs an odd number, ``x`` is padded here with
    ``value``, with one element more at the end, and the argument is (0, 0).
    """
    if padding == "VALID":
        return x, (0, 0)
    if padding != "SAME":
        raise ValueError(
            f'padding is {padding!r}, and layers know "SAME" (ceil(n / stride) outputs) and '
            '"VALID" (no padding).'
        )
    totals = [
        max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(x.shape[-2:], kernel, stride, dilation)
    ]
    if not any(total % 2 for total in totals):
        return x, (totals[0] // 2, totals[1] // 2)
    (high, wide) = totals
    sides = (wide // 2, wide - wide // 2, high // 2, high - high // 2)
    return F.pad(x, sides, value=value), (0, 0)
