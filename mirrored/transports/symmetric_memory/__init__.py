"""Transport between GPUs of one host that read each other's memory."""

from .transport import SymmetricMemory

__all__ = ["SymmetricMemory"]
