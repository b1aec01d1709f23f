"""Forms of ops that move, join or cut elements by position, and of shape ops."""

from . import join, on_halos, shape

__all__ = ["join", "on_halos", "shape"]
