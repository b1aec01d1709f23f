"""Checkpoints: whole or not there, loaded under any layout, number of ranks, and plan."""

from .agreement import CheckpointError
from .load import latest, load
from .save import save, wait

__all__ = ["CheckpointError", "latest", "load", "save", "wait"]
