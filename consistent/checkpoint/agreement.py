"""Steps of a checkpoint that, if they fail on one rank, fail on every rank with one message."""

from __future__ import annotations

from functools import partial

from mirrored import every_rank


class CheckpointError(RuntimeError):
    """Error of a checkpoint that could not be saved or read. It is raised on every rank, and says
    what went wrong on each of them."""


on_every_rank = partial(every_rank.on_every_rank, kind=CheckpointError)
from_first = partial(every_rank.from_first, kind=CheckpointError)
