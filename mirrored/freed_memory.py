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

SWITCH = "CONSISTENT_KEEP_FREED_MEMORY"
TRIM_BYTES = 1 << 30  # more than this that is free at the end of the heap is given back
MAPPED_BYTES = 32 << 20  # larger blocks are given back when they are freed; glibc allows no more
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """From now on, freed memory of this process is kept for what is allocated next. Nothing changes
    where the user has set these figures or switched it off, or where the C library has none.

    Returns:
        Whether it is kept.
    """
    if os.environ.get(SWITCH, "1") == "0" or any(name in os.environ for name in _BY_USER):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
