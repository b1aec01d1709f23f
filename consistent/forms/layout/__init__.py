"""Forms of ops that depend on the position of elements."""

from . import join, on_halos, shape

__all__ = ["join", "on_halos", "shape"]
