"""Forms of ops that look up, write or count elements."""

from . import binning, data_dependent, flat_index, getitem, one_hot

__all__ = ["binning", "data_dependent", "flat_index", "getitem", "one_hot"]
