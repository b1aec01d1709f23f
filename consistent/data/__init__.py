"""Batches as global tensors (``loader``), and the loss of a step without an extra collective."""

from typing import TYPE_CHECKING

from ..spec.elsewhere import OF_PARTS, unknown
from .loader import Loader, loader
from .loss_meter import LossMeter

__all__ = ["Loader", "LossMeter", "loader"]

if not TYPE_CHECKING:
    __getattr__ = unknown(__name__, OF_PARTS, __all__)
