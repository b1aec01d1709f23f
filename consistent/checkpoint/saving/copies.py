"""Memory for the copies that a save in the background writes.

It is kept from one save to the next: the first writes to new pages take several times as long as
the copy itself, and training stands still meanwhile. Copies go past the caches, which are left to
what the training uses.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from ...forms.native.load import streamed_copy_

_ALIGNED = 64  # bytes
_SMALL = 1 << 16  # bytes; many small copies cost by their number, and hardly use the caches


class Copies:
    """One block of memory, as large as the largest save so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: list[torch.Tensor] = []  # in it, by the last call

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the CPU that nobody else writes to, until the next call."""
        if not self._fits(tensors):
            self._lay_out(tensors)
        small: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        with torch.no_grad():
            for held, x in zip(self._held, tensors, strict=True):
                if x.nbytes <= _SMALL:
                    small.append(x)
                    into.append(held)
                elif x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
                    streamed_copy_(held, x)
                else:
                    held.copy_(x)
            if small:
                torch._foreach_copy_(into, small)  # pyright: ignore[reportPrivateImportUsage]
        return self._held

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors are like those of the last call."""
        return len(tensors) == len(self._held) and all(
            x.shape == held.shape and x.dtype == held.dtype for x, held in zip(tensors, self._held)
        )

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        places, end = [], 0
        for x in tensors:
            places.append(end)
            end += -(-x.nbytes // _ALIGNED) * _ALIGNED
        if end > self._memory.numel():
            self._held, self._memory = [], torch.empty(0, dtype=torch.uint8)  # before the new one
            self._memory = _pages(end)
        self._held = [
            self._memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
            for x, at in zip(tensors, places, strict=True)
        ]


def _pages(size: int) -> torch.Tensor:
    """Zeroed memory, in large pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
