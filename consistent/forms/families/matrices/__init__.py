"""Forms of matrix products."""

from . import grouped_mm, scaled_mm

__all__ = ["grouped_mm", "scaled_mm"]
