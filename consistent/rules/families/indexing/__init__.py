"""Rules of ops that look elements up, write them, or count them."""

from . import binning, data_dependent, flat_index, gather_scatter, getitem

__all__ = ["binning", "data_dependent", "flat_index", "gather_scatter", "getitem"]
