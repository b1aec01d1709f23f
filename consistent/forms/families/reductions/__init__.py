"""Forms of ops that reduce, scan or sort along a split dim."""

from . import cumulative, extremes, losses, order_statistics, reduce, sort

__all__ = ["cumulative", "extremes", "losses", "order_statistics", "reduce", "sort"]
