"""Memory that a rank lets go of stays with the process, for what it allocates next.

A training step allocates and frees the same blocks again and again. glibc gives a block back to the
system when it is freed, if it is large or if enough is free at the end of the heap, and the next
block lies in new pages, each of which the system clears at its first touch. Steps of small models
took 10 to 40 % longer for that, or not, depending on which blocks had been freed before. PyTorch
keeps freed memory of GPUs in the same way.

Source: mallopt(3) of the Linux manual pages.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

SWITCH = "CONSISTENT_KEEP_FREED_MEMORY"
TRIM_BYTES = 1 << 30  # more than this that is free at the end of the heap is given back
MAPPED_BYTES = 32 << 20  # larger blocks are given back when they are freed; glibc allows no more
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_keeping: Any = None  # the C library, once it keeps what is freed


def keep_freed_memory() -> bool:
    """From now on, freed memory of this process is kept for what is allocated next. Nothing changes
    where the user has set these figures or switched it off, or where the C library has none.

    Returns:
        Whether it is kept.
    """
    global _keeping
    if os.environ.get(SWITCH, "1") == "0" or any(name in os.environ for name in _BY_USER):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        library = ctypes.CDLL(None)
        mapped = library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        trimmed = library.mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return False
    _keeping = library if mapped and trimmed else None
    return _keeping is not None


def give_back_freed_memory() -> None:
    """Give what is free now back to the system, if it was kept: what a rank held while it built a
    model is not what its steps allocate."""
    if _keeping is not None:
        _keeping.malloc_trim(0)
