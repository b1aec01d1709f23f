"""``Work``: the cost of one op call, independent of any machine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Work:
    """Cost of one call of an op, independent of any machine.

    Args:
        op: the op and its overload, "aten.mm.default".
        kind: "matmul", "attention", "convolution", "pointwise", "reduction", "copy", "view" or
            "other". A view, or memory that is only allocated, costs no time on a device.
        dtype: dtype of the largest tensor, by which a machine looks up its flop/s.
        flops: multiplications and additions of matmuls, convolutions and attention, as
            ``torch.utils.flop_counter`` counts them; 0 for any other op.
        nbytes: bytes of memory read + written; bytes that stay in caches are unknown and included.
        key: description of the call without its data (``OpSignature``), from which the call can be
            made again to time it; None if there is no such call.
    """

    op: str
    kind: str
    dtype: torch.dtype
    flops: float
    nbytes: int
    key: Hashable

    @property
    def runs(self) -> bool:
        """True if the call takes time on a device; False for views and allocations."""
        return self.kind != "view"
