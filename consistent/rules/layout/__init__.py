"""Ops that move, repeat or drop elements by position, and what a view does to splits."""

from . import halos, join, shape, subscript, view

__all__ = ["halos", "join", "shape", "subscript", "view"]
