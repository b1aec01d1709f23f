"""Memory for the copies that a background save writes.

The memory is kept from one save to the next, because the first writes to new pages take several
times as long as the copy itself, and the training waits meanwhile. Large copies bypass the CPU
caches, so that these keep the data of the training.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from ...forms.native.load import streamed_copy_

_ALIGNED = 64  # bytes
_SMALL = 1 << 16  # bytes; many small copies cost by their number, and hardly use the caches


class Copies:
    """CPU copies of tensors in one reused block of memory, as large as the largest save so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: list[torch.Tensor] = []  # views into it: the copies of the last call

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return CPU copies of ``tensors``.

        They are valid until the next call, which overwrites them.
        """
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
        """Return whether the copies of the last call have the shapes and dtypes of ``tensors``.

        If so, they are overwritten, and the memory need not be divided again.
        """
        return len(tensors) == len(self._held) and all(
            x.shape == held.shape and x.dtype == held.dtype for x, held in zip(tensors, self._held)
        )

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        places, end = [], 0
        for x in tensors:
            places.append(end)
            end += -(-x.nbytes // _ALIGNED) * _ALIGNED
        if end > self._memory.numel():
            # Free the old block first, so that the two never exist at the same time.
            self._held, self._memory = [], torch.empty(0, dtype=torch.uint8)
            self._memory = _pages(end)
        self._held = [
            self._memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
            for x, at in zip(tensors, places, strict=True)
        ]


def _pages(size: int) -> torch.Tensor:
    """Return zeroed memory of ``size`` bytes, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
