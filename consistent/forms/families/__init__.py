"""Local forms, in one folder per family of ops."""

from . import indexing, layers, matrices, reductions

__all__ = ["indexing", "layers", "matrices", "reductions"]
