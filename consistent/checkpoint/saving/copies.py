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

_ALIGNMENT = 64  # bytes
_SMALL_BYTES = 1 << 16  # bytes; many small copies cost by their number, and hardly use the caches


class CopyBuffer:
    """CPU copies of tensors in one reused block of memory, as large as the largest save so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copies: list[torch.Tensor] = []  # views into it: the copies of the last call

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return CPU copies of ``tensors``.

        They are valid until the next call, which overwrites them.
        """
        if not self._has_layout_of(tensors):
            self._allocate_copies(tensors)
        small_tensors: list[torch.Tensor] = []
        small_copies: list[torch.Tensor] = []
        with torch.no_grad():
            for copy, x in zip(self._copies, tensors, strict=True):
                if x.nbytes <= _SMALL_BYTES:
                    small_tensors.append(x)
                    small_copies.append(copy)
                elif x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
                    streamed_copy_(copy, x)
                else:
                    copy.copy_(x)
            if small_tensors:
                torch._foreach_copy_(small_copies, small_tensors)  # pyright: ignore[reportPrivateImportUsage]
        return self._copies

    def _has_layout_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the copies of the last call have the shapes and dtypes of ``tensors``.

        If so, they are overwritten, and the memory need not be divided again.
        """
        return len(tensors) == len(self._copies) and all(
            x.shape == copy.shape and x.dtype == copy.dtype
            for x, copy in zip(tensors, self._copies)
        )

    def _allocate_copies(self, tensors: Sequence[torch.Tensor]) -> None:
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            end += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            # Free the old block first, so that the two never exist at the same time.
            self._copies, self._memory = [], torch.empty(0, dtype=torch.uint8)
            self._memory = _huge_pages(end)
        self._copies = [
            self._memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
            for x, at in zip(tensors, offsets, strict=True)
        ]


def _huge_pages(size: int) -> torch.Tensor:
    """Return zeroed memory of ``size`` bytes, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
