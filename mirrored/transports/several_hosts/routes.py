"""On which ranks the addends of a part are added up, in the order of ranks, so that the bits are
those of one host and the bytes between hosts are the fewest.

A sum in the order of ranks is a chain: ranks that follow each other on one host add up theirs
there, and the sum so far goes to the next host. What comes after it may also be sent as it is.

```
ranks       0  1 | 2  3         two hosts
part of 2   0+1 -------> +2+3                   one message of the part's size
part of 0   0+1 <------- 2, 3                   each addend
            0+1 -------> +2+3 -------> 0        or there and back: less, for hosts of more ranks
```

Between hosts a reduce-scatter of n bytes so sends n and a half for two hosts, and not n: whoever
has the first ranks cannot get a sum that is in order in one message. Sums of each host's sums
would, but their bits would depend on where ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from .hosts import partner


class Stage(NamedTuple):
    """The rank at `worker` adds the addends of the positions `adds`, in order, to what comes from
    the stage before."""

    worker: int
    adds: tuple[int, ...]


@lru_cache(1 << 12)
def route(of: tuple[int, ...], target: int, wide: int, at_once: bool) -> tuple[Stage, ...]:
    """The stages of the sum that the rank at `target` gets; the last one's result goes there.

    Args:
        of: the host of each position.
        wide: how many times the bytes of an addend a sum has that is not rounded yet.
        at_once: only routes on which no rank has to wait for one message before it sends another.
    """
    return min(_routes(of, target, wide, at_once), key=lambda found: found[:2])[2]


def _routes(
    of: tuple[int, ...], target: int, wide: int, at_once: bool
) -> Iterator[tuple[int, int, tuple[Stage, ...]]]:
    """(bytes between hosts, in parts; messages that wait for each other; stages) of each route."""
    runs = [(host, [k for k, _ in run]) for host, run in groupby(enumerate(of), lambda at: at[1])]
    for last in {of[target], runs[-1][0]}:
        for chained in range(len(runs)):
            if chained and (runs[chained - 1][0] == last or (at_once and chained > 1)):
                continue
            is_there = last == of[target]
            if at_once and not is_there:
                continue
            rest = tuple(k for _, run in runs[chained:] for k in run)
            sent = sum(of[k] != last for k in rest)
            worker = target if is_there else partner(of, target, last)
            stages = [Stage(partner(of, target, host), tuple(run)) for host, run in runs[:chained]]
            hops = chained + (not is_there)
            yield wide * chained + sent + (not is_there), hops, (*stages, Stage(worker, rest))
