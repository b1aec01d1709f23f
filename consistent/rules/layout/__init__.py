"""Rules of ops that move, repeat or drop elements by position, and of views and joins."""

from . import halos, join, shape, subscript, view

__all__ = ["halos", "join", "shape", "subscript", "view"]
