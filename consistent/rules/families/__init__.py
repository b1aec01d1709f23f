"""The rows, a folder for each family of ops."""

from . import elementwise, indexing, layers, matrices, reductions

__all__ = ["elementwise", "indexing", "layers", "matrices", "reductions"]
