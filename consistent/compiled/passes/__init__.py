"""Optimization passes over a recorded graph before it is compiled: one idea per file, run in a
fixed order."""

from __future__ import annotations

from collections.abc import Callable

from ..options import CompileOptions
from .bound_memory import bound_memory, limit_keep_bytes
from .fuse import fuse
from .merge_equal import merge_equal
from .overlap import overlap
from .reassociate_all_reduce import reassociate_all_reduce
from .remove_redundant_gather import remove_redundant_gather
from .trace import RemovedMessage, Trace

Pass = Callable[[Trace, CompileOptions], None]

PASSES: tuple[Pass, ...] = (
    # memory=: counts the bytes that the recorded ops hold at a time. It comes first, since later
    # passes may keep results for longer, in total up to what the bound leaves on the fullest rank.
    limit_keep_bytes,
    # Removes a gather if only this rank's own shard of its result is read, and copies that shard.
    # It comes before merge_equal, which could otherwise merge other gathers into the unneeded
    # gather.
    remove_redundant_gather,
    # Equal messages on equal values are sent once, and the first result is kept for later readers.
    merge_equal,
    # Two sums over ranks that are added to each other: adds first, and then sums over ranks once.
    # It comes after merge_equal, which can leave one message where two were to be added.
    reassociate_all_reduce,
    # memory=: recomputes cheap values and repeats gathers, until the bound is met. It comes after
    # all passes that remove messages, which change what is held and would remove repeated gathers.
    bound_memory,
    # fuse=: a message and the ops next to it become one call of a kernel. It comes after
    # bound_memory, which can repeat an op or a gather, but not a call that is both.
    fuse,
    # overlap=: starts messages early and waits for them late. It comes last, when the set of
    # messages is final, and no later pass may move the ops that run concurrently with them.
    overlap,
)

__all__ = ["PASSES", "Pass", "RemovedMessage", "Trace"]
