"""Batches as global tensors (``loader``), and the loss of a step without an extra collective."""

from typing import TYPE_CHECKING

from ..spec.elsewhere import PART_HINTS, module_getattr
from .loader import Loader, loader
from .loss_meter import LossMeter

__all__ = ["Loader", "LossMeter", "loader"]

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, PART_HINTS, __all__)
