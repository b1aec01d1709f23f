"""What is changed in a recorded graph before it is run: one idea a file, and all in order.

A pass takes a ``Trace`` and the options of the step, and changes the graph. It returns at once
where it was not asked for. All ranks run all passes, or none does, so a pass may gather what ranks
have to decide together. What it decides alone follows from the graph and the messages in it, which
are alike on all ranks; ranks compare what is left before they use it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..options import CompileOptions
from .bound_memory import bound_memory, leave_room
from .fuse import fuse
from .merge_equal import merge_equal
from .overlap import overlap
from .reassociate_all_reduce import reassociate_all_reduce
from .remove_redundant_gather import remove_redundant_gather
from .trace import Saved, Trace

Pass = Callable[[Trace, CompileOptions], None]

PASSES: tuple[Pass, ...] = (
    # memory=: counts what the recorded ops hold at a time. It comes first, since the passes after
    # it may keep results for longer, and together no more than the bound leaves on the fullest
    # rank.
    leave_room,
    # A gather of which only this rank's own part is read is left out, and that part is copied. It
    # comes before merge_equal: a gather that is not needed must not be the one that others join.
    remove_redundant_gather,
    # Equal messages on equal values are sent once, and the first result is kept for later readers.
    merge_equal,
    # Two sums over ranks that are added are added before, and summed over ranks once. It comes
    # after merge_equal, which can leave one message where two were to be added.
    reassociate_all_reduce,
    # memory=: what is cheap is made again, and what was gathered is gathered again, until the bound
    # is met. It comes after all passes that change which messages are sent: these change what is
    # held, and it repeats some of them on purpose.
    bound_memory,
    # fuse=: a message and the ops beside it become one call of a kernel. It comes after
    # bound_memory, which can repeat an op or a gather, but no call that is both.
    fuse,
    # overlap=: messages are started early and waited for late. It comes last: only then it is known
    # which messages there are, and nothing may move what runs beside them.
    overlap,
)

__all__ = ["PASSES", "Pass", "Saved", "Trace"]
