"""Forms of matmuls that torch's op on the shards does not compute: grouped and float8-scaled."""

from . import grouped_mm, scaled_mm

__all__ = ["grouped_mm", "scaled_mm"]
