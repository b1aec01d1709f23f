"""Reading of integers from a tensor by a form whose message or output sizes depend on them.

In a simulated program tensors have no values, and the contents of their memory mean nothing, so a
form states which numbers to use instead.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..spec.tracer import callbacks

_LACKS_VALUES = callbacks("lacks_values")


def has_values(x: Tensor) -> bool:
    """Return whether ``x`` has values that may be read, which tensors of a simulation lack."""
    return not any(lacks(x) for lacks in _LACKS_VALUES)


def read_ints(x: Tensor, otherwise: Callable[[], list[int]] | None = None) -> list[int]:
    """Return the values of the 1-d tensor ``x`` as ints.

    In a simulation, where ``x`` has no values, return ``otherwise()``. Without ``otherwise`` the
    values are read one by one by ``int(n)``, which the simulation answers or rejects.
    """
    if has_values(x):
        return x.tolist()
    return [int(n) for n in x] if otherwise is None else otherwise()
