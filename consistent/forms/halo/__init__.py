"""Forms that fetch what their outputs read of neighbouring shards along a split dim."""

from . import halo, spatial

__all__ = ["halo", "spatial"]
