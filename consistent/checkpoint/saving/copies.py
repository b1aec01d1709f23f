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


class Copies:
    """One block of memory, as large as the largest save so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the CPU that nobody else writes to, until the next call."""
        places, end = [], 0
        for x in tensors:
            places.append(end)
            end += -(-x.nbytes // _ALIGNED) * _ALIGNED
        if end > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # first let go of the old one
            self._memory = _pages(end)
        return [self._copy(x, at) for x, at in zip(tensors, places, strict=True)]

    def _copy(self, x: torch.Tensor, at: int) -> torch.Tensor:
        held = self._memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
        with torch.no_grad():
            plain = x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg())
            return streamed_copy_(held, x) if plain else held.copy_(x)


def _pages(size: int) -> torch.Tensor:
    """Zeroed memory, in large pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
