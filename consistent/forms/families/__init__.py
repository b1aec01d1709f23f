"""Local forms, a folder for each family of ops."""

from . import indexing, layers, reductions

__all__ = ["indexing", "layers", "reductions"]
