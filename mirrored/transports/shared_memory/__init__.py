"""Transport between ranks of one host that read and write one shared memory segment."""

from .pieces import bytes_with
from .segments import is_wanted, warn
from .transport import REDUCED, SUMMED, SharedMemory

__all__ = ["REDUCED", "SUMMED", "SharedMemory", "bytes_with", "is_wanted", "warn"]
