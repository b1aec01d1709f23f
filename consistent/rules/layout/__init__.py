"""Rules of ops that move, repeat or drop elements by position, and of views."""

from . import halos, join, shape, subscript, view

__all__ = ["halos", "join", "shape", "subscript", "view"]
