"""Ops whose outputs look at their neighbours along a split dim: which inputs a rank needs."""

from . import halo, spatial

__all__ = ["halo", "spatial"]
