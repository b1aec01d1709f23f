"""Rules of ops that reduce, order or scan along dims, and of losses."""

from . import losses, ordering, reduce

__all__ = ["losses", "ordering", "reduce"]
