"""Ranks of several hosts: those of one host share memory, and between hosts messages go."""

from .transport import SeveralHosts

__all__ = ["SeveralHosts"]
