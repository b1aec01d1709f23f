"""Halos: the neighbouring inputs that a rank needs for its outputs along a split dim."""

from . import halo, spatial

__all__ = ["halo", "spatial"]
