"""Batches as global tensors, and the loss of a step without a collective of its own."""

from .loader import Loader, loader
from .loss_meter import LossMeter

__all__ = ["Loader", "LossMeter", "loader"]
