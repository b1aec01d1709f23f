"""Steps of a checkpoint that fail on every rank with one message if they fail on one."""

from __future__ import annotations

from functools import partial

from mirrored import every_rank


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read. Raised on every rank, with what each of them met."""


on_every_rank = partial(every_rank.on_every_rank, kind=CheckpointError)
from_first = partial(every_rank.from_first, kind=CheckpointError)
