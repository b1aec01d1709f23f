"""Modules: placing a whole module."""

from .parallelize import parallelize

__all__ = ["parallelize"]
