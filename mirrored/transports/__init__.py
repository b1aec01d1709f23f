"""The ways in which tensors travel between ranks; `default.py` says which one is in use."""

from importlib import import_module

import torch  # noqa: F401  (its libraries are those of the native part)

from ..native import not_loaded

try:
    import_module("mirrored.transports._C")  # by name, since checkers run before it is built
except ImportError as error:
    raise not_loaded("mirrored.transports._C", error) from error
