"""Rows of the table of rules, in a folder for each family of ops."""

from . import elementwise, indexing, layers, matrices, reductions

__all__ = ["elementwise", "indexing", "layers", "matrices", "reductions"]
