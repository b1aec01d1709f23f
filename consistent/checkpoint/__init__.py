"""Checkpoints: saved completely or not at all, and loaded under any layout and number of ranks."""

from typing import TYPE_CHECKING

from ..spec.elsewhere import PART_HINTS, module_getattr
from .agreement import CheckpointError
from .dtensor import from_dtensor, to_dtensor
from .files.opened import opened
from .files.reader import Reader
from .full import full_state_dict, save_full
from .load import latest, load
from .save import save, wait
from .signals import on_signal

__all__ = [
    "CheckpointError",
    "Reader",
    "from_dtensor",
    "full_state_dict",
    "latest",
    "load",
    "on_signal",
    "opened",
    "save",
    "save_full",
    "to_dtensor",
    "wait",
]

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, PART_HINTS, __all__)
