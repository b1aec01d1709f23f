"""Transport between ranks of one host that read and write one shared memory segment."""

from .pieces import nbytes_with_sizes
from .segments import should_share_memory, warn
from .transport import REDUCIBLE_DTYPES, SUMMABLE_DTYPES, SharedMemory

__all__ = [
    "REDUCIBLE_DTYPES",
    "SUMMABLE_DTYPES",
    "SharedMemory",
    "nbytes_with_sizes",
    "should_share_memory",
    "warn",
]
