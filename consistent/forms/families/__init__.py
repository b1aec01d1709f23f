"""Local forms, a folder for each family of ops."""

from . import indexing, layers, matrices, reductions

__all__ = ["indexing", "layers", "matrices", "reductions"]
