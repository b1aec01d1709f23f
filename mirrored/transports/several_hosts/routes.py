"""Selects the ranks that sum each part of a reduction between several hosts.

A reduction is cut into a part for each rank; each rank's values for a part are its addend. Sums are
in the order of ranks, so that they have the same bits as on one host, and as few bytes as possible
are sent between hosts. A sum in the order of ranks is a chain: consecutive ranks on one host sum
their addends there, and the sum so far goes to the next host. Later addends may also be sent as
they are.

```
ranks       0  1 | 2  3         two hosts
part of 2   0+1 -------> +2+3                   one message of the part's size
part of 0   0+1 <------- 2, 3                   each addend
            0+1 -------> +2+3 -------> 0        or there and back: less, for hosts of more ranks
```

So a reduce-scatter of n bytes between two hosts sends 1.5 n bytes, and not n: the host with the
first ranks cannot get an ordered sum in one message. Adding up the sums of the hosts would take one
message, but the bits would depend on where ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from .hosts import partner


class SumStep(NamedTuple):
    """One step of a sum that goes from rank to rank; one rank carries it out.

    The rank at position ``worker`` of the group adds the addends of the positions ``adds``, in
    order, to the sum that the step before has sent to it.
    """

    worker: int
    adds: tuple[int, ...]


@lru_cache(1 << 12)
def plan_sum(
    host_of: tuple[int, ...], target: int, wide: int, at_once: bool
) -> tuple[SumStep, ...]:
    """Return the steps that sum one part of a reduction for the rank at position ``target``.

    That rank gets the result of the last step. Of all possible sequences of steps, this is the one
    that sends the fewest bytes between hosts.

    Args:
        host_of: the host of each position.
        target: the position in the group of the rank that gets the sum.
        wide: the bytes of an unrounded sum, as a multiple of an addend's.
        at_once: use only routes on which no rank waits for one message before it sends another.
    """
    return min(
        _candidate_routes(host_of, target, wide, at_once), key=lambda candidate: candidate[:2]
    )[2]


def _candidate_routes(
    host_of: tuple[int, ...], target: int, wide: int, at_once: bool
) -> Iterator[tuple[int, int, tuple[SumStep, ...]]]:
    """Yield (bytes, hops, steps) of each sequence of steps that ``plan_sum`` chooses from.

    The arguments are those of ``plan_sum``. Bytes are those sent between hosts, as a multiple of
    the part's; hops is the number of messages that must be sent one after the other.
    """
    # Runs of consecutive positions on one host: only these may be summed without changing the
    # order.
    runs = [
        (host, [k for k, _ in run]) for host, run in groupby(enumerate(host_of), lambda at: at[1])
    ]
    # The first `chained_runs` runs are summed one after the other, each on its host. The rest is
    # summed on `last_host`: the target's, or that of the last run, which then sends the sum to the
    # target.
    for last_host in {host_of[target], runs[-1][0]}:
        for chained_runs in range(len(runs)):
            if chained_runs and (
                runs[chained_runs - 1][0] == last_host or (at_once and chained_runs > 1)
            ):
                continue
            ends_on_target_host = last_host == host_of[target]
            if at_once and not ends_on_target_host:
                continue
            rest_adds = tuple(k for _, run in runs[chained_runs:] for k in run)
            sent_addends = sum(host_of[k] != last_host for k in rest_adds)
            worker = target if ends_on_target_host else partner(host_of, target, last_host)
            stages = [
                SumStep(partner(host_of, target, host), tuple(run))
                for host, run in runs[:chained_runs]
            ]
            hops = chained_runs + (not ends_on_target_host)
            yield (
                wide * chained_runs + sent_addends + (not ends_on_target_host),
                hops,
                (*stages, SumStep(worker, rest_adds)),
            )
