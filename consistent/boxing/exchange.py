"""Plan of one exchange between two placements: which rank sends which box to which.

This is arithmetic only: no tensors, no communication. A rank of the target needs the box that the
target spec gives it. Each part of that box comes from one rank that has the part, and from the
target rank itself if that rank has it.

```
7 rows     S(0) on ranks 0, 1      ->      S(0) on ranks 1, 2, 3
           rank 0   rows 0-3               rank 1   rows 0-2   from 0
           rank 1   rows 4-6               rank 2   rows 3-4   row 3 from 0, row 4 from 1
                                           rank 3   rows 5-6   from 1
```

Ranks that differ only along B axes hold the same data, so the least loaded of them sends. The
addends of a P source are sent as they are and summed by the receiver. Ranks that differ along a B
axis may have divided the sum differently, so all addends of one sum come from ranks with the same
coordinate along the B axes. Along a P axis of the target every piece of an addend goes to one rank,
if possible to the rank that already holds it, and the other ranks hold zeros there. For P(max) and
P(min) read "largest" or "smallest" for "sum", and "the identity of max or min" for "zero".
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..spec import Coordinate, Placement, TensorSpec
from .steps import Exchange, Transfer

Region = tuple[tuple[int, ...], tuple[int, ...]]  # starts and sizes in the logical tensor
Holders = list[list[int]]  # [addend][replica] -> rank that holds the addend of one box


@lru_cache(maxsize=1 << 11)
def exchange(src: TensorSpec, dst: TensorSpec) -> Exchange:
    """Return the exchange that takes a tensor from ``src`` to ``dst``.

    An exchange is a list of transfers: rank a sends this box of the tensor to rank b. It is how
    tensors change placement; within a placement it is used where it sends less than moves axis by
    axis.
    """
    transfers = tuple(_transfers(src, dst))
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for t in transfers:
        sent[t.source] += t.sent_bytes(src.dtype.itemsize)
        received[t.target] += t.sent_bytes(src.dtype.itemsize)
    busiest = max([*sent.values(), *received.values()], default=0)
    largest = dst.largest_nbytes
    most_sent = max(sent.values(), default=0)
    return Exchange(src, dst, transfers, most_sent, sum(sent.values()), busiest, largest)


def _transfers(src: TensorSpec, dst: TensorSpec) -> Iterator[Transfer]:
    """Yield the transfers to every rank of the target, rank by rank and box by box.

    The order is the same on all ranks, because a sender packs, and a receiver unpacks, parts in it.
    """
    boxes = _holders(src)
    routings = {
        box: _choose_routing(box_holders, box, dst, k)
        for k, (box, box_holders) in enumerate(boxes.items())
    }
    load: Counter[int] = Counter()
    # Wanted region -> [(box, part of the region in that box)], shared by ranks that want the same.
    parts_of_region: dict[Region, list[tuple[Region, Region]]] = {}
    for coordinate in _coordinates(dst.placement):
        target, region, slot = (
            dst.placement.rank_at(coordinate),
            dst.region(coordinate),
            _partial_index(dst, coordinate),
        )
        if region not in parts_of_region and region in boxes and all(region[1]):
            parts_of_region[region] = [(region, region)]  # boxes do not overlap each other
        if region not in parts_of_region:
            parts = ((box, overlap(box, region)) for box in boxes)
            parts_of_region[region] = [(box, part) for box, part in parts if part is not None]
        for box, part in parts_of_region[region]:
            box_holders, routing = boxes[box], routings[box]
            addends = [box_holders[k] for k in range(len(box_holders)) if routing.slots[k] == slot]
            if not addends:  # the addends of this box go to other places; zeros here
                continue
            replica = (
                _cheapest_replica(addends, target, load)
                if routing.replica is None
                else routing.replica
            )
            for addend, holders in enumerate(addends):
                if holders[replica] != target:
                    load[holders[replica]] += math.prod(part[1])
                yield Transfer(holders[replica], target, *part, addend)


@lru_cache(maxsize=1 << 11)
def _holders(src: TensorSpec) -> dict[Region, Holders]:
    """Return which ranks hold each box of the source: box -> [addend][replica] -> rank.

    Ranks along S axes hold different boxes. Of one box, ranks along P axes hold different addends,
    and ranks along B axes hold replicas of the same addend.
    """
    holders: dict[Region, Holders] = {}
    for coordinate in _coordinates(src.placement):
        box_holders = holders.setdefault(
            src.region(coordinate), [[] for _ in range(_partial_count(src))]
        )
        box_holders[_partial_index(src, coordinate)].append(src.placement.rank_at(coordinate))
    # Sorted: the order of boxes is the order of messages.
    return dict(sorted(holders.items()))


class _Routing(NamedTuple):
    """To which positions along the target's P axes the addends of one box go, and who sends them.

    The tensor is the sum over these positions, so each addend must go to exactly one of them.
    """

    slots: tuple[int, ...]  # for each addend, its place along the target's P axes
    replica: int | None  # which replica sends; None where every target may choose


def _choose_routing(
    box_holders: Holders, box: Region, dst: TensorSpec, first_slot: int
) -> _Routing:
    """Choose to which positions along the target's P axes the addends of ``box`` go.

    An addend that a rank of the target holds already stays at that rank's position, so that it need
    not be sent. The others are dealt out in turn, to ``first_slot``, ``first_slot + 1``, ...,
    modulo their number.

    Args:
        box_holders: ranks that hold the box, as in ``_holders``.
        box: (starts, sizes) of the box.
        dst: spec of the target; if it is not P, all addends go to its only position.
        first_slot: position at which dealing starts, different for each box to spread the work.
    """
    count = _partial_count(dst)
    if count == 1:
        return _Routing((0,) * len(box_holders), None)
    replicas = range(len(box_holders[0]))
    kept_parts = [[_kept_part(holders[k], box, dst) for holders in box_holders] for k in replicas]
    best_replica = max(replicas, key=lambda k: sum(size for _, size in kept_parts[k]))
    slots = (
        slot if size else (first_slot + addend) % count
        for addend, (slot, size) in enumerate(kept_parts[best_replica])
    )
    return _Routing(tuple(slots), None if len(box_holders) == 1 else best_replica)


def _kept_part(rank: int, box: Region, dst: TensorSpec) -> tuple[int, int]:
    """Return (position of ``rank`` along the P axes of ``dst``, elements of ``box`` that it keeps).

    It keeps what is both in ``box``, which it holds already, and in its own shard of ``dst``. (0,
    0) if there is nothing.
    """
    coordinate = dst.placement.coordinate_of(rank)
    part = None if coordinate is None else overlap(box, dst.region(coordinate))
    return (
        (0, 0)
        if coordinate is None or part is None
        else (_partial_index(dst, coordinate), math.prod(part[1]))
    )


def _cheapest_replica(addends: Holders, target: int, load: Counter[int]) -> int:
    """Return the index of the replica that sends ``target`` the addends in the fewest messages.

    A rank that is itself the target sends no message. Among equals it is the replica whose ranks
    have sent the fewest elements so far.

    Args:
        addends: ranks by [addend][replica].
        target: the rank that receives.
        load: rank -> elements that it sends already.
    """

    def cost(replica: int) -> tuple[int, int]:
        senders = [ranks[replica] for ranks in addends if ranks[replica] != target]
        return len(senders), sum(load[rank] for rank in senders)

    return min(range(len(addends[0])), key=cost)


def overlap(a: Region, b: Region) -> Region | None:
    """Return the intersection of two boxes, (starts, sizes) each, or None if it is empty."""
    starts, sizes = [], []
    for i, m, j, n in zip(*a, *b):
        start = max(i, j)
        size = min(i + m, j + n) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return tuple(starts), tuple(sizes)


def _partial_index(spec: TensorSpec, coordinate: Coordinate) -> int:
    """Return which addend of a P tensor the rank at ``coordinate`` holds: its place on the P axes.

    With several P axes the position counts in row-major order; without any it is 0.
    """
    index = 0
    for c, n, entry in zip(coordinate, spec.placement.shape, spec.sbp):
        if entry.is_partial:
            index = index * n + c
    return index


def _partial_count(spec: TensorSpec) -> int:
    """Return how many addends a tensor has: the product of the sizes of its P axes, or 1."""
    return math.prod(n for n, entry in zip(spec.placement.shape, spec.sbp) if entry.is_partial)


def _coordinates(placement: Placement) -> Iterator[Coordinate]:
    return itertools.product(*map(range, placement.shape))
