"""Halos: the inputs that a rank needs for ops that look at neighbours along a split dim."""

from . import halo, spatial

__all__ = ["halo", "spatial"]
