"""Forms of ops that go by position."""

from . import join, on_halos, shape

__all__ = ["join", "on_halos", "shape"]
