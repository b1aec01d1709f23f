"""Transports: the ways in which tensors travel between ranks. ``default.py`` selects one."""

from ..native import load_build

load_build(__name__)
