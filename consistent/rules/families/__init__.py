"""Rules of ops, as rows of the table, in a folder for each family of ops."""

from . import elementwise, indexing, layers, matrices, reductions

__all__ = ["elementwise", "indexing", "layers", "matrices", "reductions"]
