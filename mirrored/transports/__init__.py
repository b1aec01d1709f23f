"""The ways in which tensors travel between ranks; `default.py` says which one is in use."""

from ..native import load_build

load_build(__name__)
