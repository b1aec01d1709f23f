"""Whole numbers that a form reads from a tensor, since sizes depend on them.

A simulated program has tensors without values. What memory happens to hold there is no number, so a
form says what stands for them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..spec.tracer import callbacks

_LACKS_VALUES = callbacks("lacks_values")


def has_values(x: Tensor) -> bool:
    """Whether ``x`` has values that may be read."""
    return not any(lacks(x) for lacks in _LACKS_VALUES)


def whole_numbers(x: Tensor, otherwise: Callable[[], list[int]] | None = None) -> list[int]:
    """The values of ``x``, which has one dim. Where there are none, what ``otherwise`` says;
    without it they are asked for one by one, which a simulation answers or refuses."""
    if has_values(x):
        return x.tolist()
    return [int(n) for n in x] if otherwise is None else otherwise()
