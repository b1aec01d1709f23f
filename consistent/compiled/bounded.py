"""A program that holds no more than so many bytes at a time, where it can.

```
op by op         all ranks: the most that one holds         how much merge_equal may keep
passes
recompute        each rank by itself: it sends nothing      passes/recompute
gather_again     all ranks together, until none is above    passes/gather_again
```
"""

from __future__ import annotations

from ..spec.bytes_text import bytes_text
from .agree import gathered
from .passes import Trace
from .passes.gather_again import Repetition, may_repeat, proposals, repeat
from .passes.peak import Count, remove_dead
from .passes.recompute import recompute

_ROUNDS = 64


class Bound:
    """The bound of one recording. Every rank calls ``begin`` and ``end``, or ``absent``.

    Args:
        bytes: that the program may hold at a time.
    """

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self._all = False  # every rank has a program
        self._before = 0

    def absent(self) -> None:
        """This rank has no program."""
        gathered(None)

    def begin(self, trace: Trace) -> None:
        """Before other passes: these may keep what the bound leaves."""
        remove_dead(trace)
        self._before = Count(trace).bytes
        every = gathered(self._before)
        self._all = None not in every
        if self._all:
            trace.keep_bytes = min(trace.keep_bytes, max(0, self.bytes - max(every)))

    def end(self, trace: Trace) -> None:
        """After them."""
        if not self._all:
            return
        remove_dead(trace)
        again = recompute(trace, self.bytes)
        sent = 0
        refused: set[Repetition] = set()
        for _ in range(_ROUNDS):
            every = gathered(proposals(trace, self.bytes))
            wanted = sorted({one for mine in every for one in mine} - refused)
            if not wanted:
                break
            if all(gathered(may_repeat(trace, wanted[0]))):
                repeat(trace, wanted[0])
                sent += 1
            else:
                refused.add(wanted[0])
        again += recompute(trace, self.bytes) if sent else 0
        after = Count(trace).bytes
        trace.notes.append(
            f"memory: {bytes_text(self._before)} held at a time, {bytes_text(after)} after "
            f"{again} values are made again and {sent} gathered again; "
            f"the bound is {bytes_text(self.bytes)}"
            + ("" if after <= self.bytes else ", and nothing else can be let go of")
        )
