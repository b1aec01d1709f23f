"""Forms that fetch the elements of neighbouring shards which a rank's outputs need (halos)."""

from . import halo, spatial

__all__ = ["halo", "spatial"]
