"""Forms of ops that look elements up, write them, or count them."""

from . import binning, data_dependent, flat_index, getitem

__all__ = ["binning", "data_dependent", "flat_index", "getitem"]
