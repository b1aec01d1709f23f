"""Conversion of numbers to integer keys that compare in torch's sort order.

Integer keys have no NaN to handle, ``~key`` reverses the order, and their bytes can be counted
(``order_statistics.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sort_keys(x: Tensor, descending: bool = False) -> Tensor:
    """Return integers that compare as the elements of ``x`` do; NaN is the largest, and -0 is 0.

    They are as wide as the elements, but uint8 takes 16 bits, for the sign. With ``descending``
    they compare the other way.
    """
    x = x.detach()
    if x.is_floating_point():
        bits = (x + 0.0).view(_INTS[x.dtype.itemsize])
        top = torch.iinfo(bits.dtype).max
        # For negative floats a larger magnitude is a smaller number: flip all bits but the sign.
        key = torch.where(bits < 0, bits ^ top, bits).masked_fill(x.isnan(), top)
    elif x.dtype == torch.bool:
        key = x.to(torch.int8)
    else:
        key = x.to(torch.int16) if x.dtype == torch.uint8 else x
    return ~key if descending else key
