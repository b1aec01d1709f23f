"""Ranks of one host read and write one segment of memory."""

from .pieces import bytes_with
from .segments import is_wanted, warn
from .transport import REDUCED, SUMMED, SharedMemory

__all__ = ["REDUCED", "SUMMED", "SharedMemory", "bytes_with", "is_wanted", "warn"]
