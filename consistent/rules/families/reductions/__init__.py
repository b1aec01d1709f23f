"""Ops that look along dims: sums, orders, losses."""

from . import losses, ordering, reduce

__all__ = ["losses", "ordering", "reduce"]
