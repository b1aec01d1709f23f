"""Helpers that make all ranks raise ``CheckpointError`` if a step fails on one of them."""

from __future__ import annotations

from functools import partial

from mirrored import every_rank


class CheckpointError(RuntimeError):
    """Error of a checkpoint that could not be saved or read.

    It is raised on every rank, and says what went wrong on each of them.
    """


on_every_rank = partial(every_rank.on_every_rank, kind=CheckpointError)
from_rank_0 = partial(every_rank.from_rank_0, kind=CheckpointError)
