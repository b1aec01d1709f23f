"""Forms of matrix products that plain shards cannot compute: grouped and float8-scaled."""

from . import grouped_mm, scaled_mm

__all__ = ["grouped_mm", "scaled_mm"]
