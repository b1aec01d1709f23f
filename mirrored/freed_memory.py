"""Keeps freed CPU memory in the process, so that the next allocations reuse it.

A training step allocates and frees the same blocks again and again. When a block is freed, glibc
returns it to the system if it is large or if enough is free at the end of the heap. The next block
then gets new pages, each of which the system clears at its first touch. Steps of small models took
10 to 40 % longer for that, or not, depending on which blocks had been freed before. PyTorch keeps
freed memory of GPUs in the same way.

Source: mallopt(3) of the Linux manual pages.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

SWITCH = "CONSISTENT_KEEP_FREED_MEMORY"
TRIM_BYTES = 1 << 30  # free memory at the end of the heap beyond this goes back to the system
MAPPED_BYTES = 32 << 20  # larger blocks go back when they are freed; the most that glibc allows
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's own environment variables: if the user has set one, its value stays.
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_libc: Any = None  # the C library, once it keeps freed memory


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees from now on.

    Nothing changes if the user has set glibc's thresholds, if the environment variable
    ``CONSISTENT_KEEP_FREED_MEMORY`` is "0", or if the C library has no ``mallopt``.

    Returns:
        Whether freed memory is kept.
    """
    global _libc
    if os.environ.get(SWITCH, "1") == "0" or any(name in os.environ for name in _USER_VARIABLES):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        library = ctypes.CDLL(None)
        # Setting either threshold also stops glibc from adjusting both at run time.
        mapped = library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        trimmed = library.mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return False
    _libc = library if mapped and trimmed else None
    return _libc is not None


def give_back_freed_memory() -> None:
    """Return the freed memory that this process has kept to the operating system.

    Call it once a model is built: training steps allocate blocks of other sizes, and would not
    reuse this memory. Does nothing unless ``keep_freed_memory`` has taken effect.
    """
    if _libc is not None:
        _libc.malloc_trim(0)
