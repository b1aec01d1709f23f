"""Many exchanges at once, in as few messages as there are pairs of ranks.

```
            tensor a          tensor b             one message
rank 0      a[0:2] to 2       b[0:1] to 2    --->  a[0:2] b[0:1]  --->  rank 2
rank 1      a[2:4] to 2                      --->  a[2:4]         --->  rank 2
```

What a rank has already is copied, or stays where it is, and is not sent. The parts for one rank
lie side by side as bytes, those of the largest elements first, so that each is aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mirrored.transports.default import current
from mirrored.transports.failures import counts_lacks

from ..boxing.exchange import exchange
from ..boxing.steps import Transfer
from ..spec import TensorSpec
from .run import run
from .run_exchange import Orders, cut, orders_of, wire_of

# Bytes that all ranks together send at once: long enough that the number of messages does not
# matter, short enough to be little beside a model that fills the memory.
BUCKET = 64 << 20


@counts_lacks
def run_exchanges(
    locals_: Sequence[Tensor],
    routes: Sequence[tuple[TensorSpec, TensorSpec]],
    into: Sequence[Tensor],
) -> None:
    """Write into each of ``into`` this rank's shard under the second spec of its route.

    Every rank of the world may call; those outside all placements send nothing. Each rank of a
    target receives what it needs and does not hold, once: no fewer bytes would do.

    Args:
        locals_: this rank's shards under the first specs.
        routes: (src, dst) of each, none of them partial, all between devices of the same kinds.
        into: the shards to fill, on ``meta`` outside the target. One that is ``locals_``' own
            tensor is left alone: this rank keeps what it has.
    """
    alone = [i for i, ends in enumerate(routes) if any(spec.layout.is_cut for spec in ends)]
    for i in alone:  # a rank has no one box of it
        if into[i] is not locals_[i]:
            into[i].copy_(run(locals_[i], *routes[i]))
    for bucket in _buckets(routes, alone):
        orders = {i: orders_of(*routes[i]) for i in bucket}
        arrived = _messages(locals_, routes, orders)
        for i, each in orders.items():
            if each.to is not None and into[i] is not locals_[i]:
                _fill(into[i], locals_[i], routes[i], each, arrived.get(i, {}))


def _buckets(
    routes: Sequence[tuple[TensorSpec, TensorSpec]], alone: Sequence[int]
) -> Iterator[list[int]]:
    """Positions of the routes that are sent together, the same on every rank; not those that go
    ``alone``."""
    bucket: list[int] = []
    size = 0
    left = set(range(len(routes))).difference(alone)
    for i in sorted(left, key=lambda i: (-routes[i][0].dtype.itemsize, i)):
        total = exchange(*routes[i]).total
        if bucket and size + total > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += total
    if bucket:
        yield bucket


def _messages(
    locals_: Sequence[Tensor],
    routes: Sequence[tuple[TensorSpec, TensorSpec]],
    orders: dict[int, Orders],
) -> dict[int, dict[Transfer, Tensor]]:
    """Position -> transfer -> the part that came from another rank."""
    members = _members(tuple(routes[i] for i in orders))
    if not any(rank in members for each in orders.values() for rank in (each.source, each.target)):
        return {}
    wire = wire_of(*routes[next(iter(orders))])
    going: dict[int, list[Tensor]] = {}
    coming: dict[int, list[tuple[int, Transfer]]] = {}
    for i, each in orders.items():
        origin = routes[i][0].region(each.at)[0]
        for t in each.going:
            going.setdefault(t.target, []).append(_as_bytes(cut(locals_[i], t, origin)).to(wire))
        for t in each.arriving:
            if t.source != each.source:
                coming.setdefault(t.source, []).append((i, t))
    sends = [(to, parts[0] if len(parts) == 1 else torch.cat(parts)) for to, parts in going.items()]
    sizes = {
        source: [math.prod(t.sizes) * routes[i][0].dtype.itemsize for i, t in parts]
        for source, parts in coming.items()
    }
    receives = [(source, (sum(each),), torch.uint8) for source, each in sizes.items()]
    got = current().exchange(sends, receives, members, wire)
    found: dict[int, dict[Transfer, Tensor]] = {}
    for flat, (source, parts) in zip(got, coming.items(), strict=True):
        for (i, t), piece in zip(parts, flat.split(sizes[source]), strict=True):
            found.setdefault(i, {})[t] = piece.view(routes[i][0].dtype).view(t.sizes)
    return found


@lru_cache(maxsize=1 << 8)
def _members(routes: tuple[tuple[TensorSpec, TensorSpec], ...]) -> tuple[int, ...]:
    """The ranks of all placements between which something is sent, the same on every rank."""
    found: set[int] = set()
    for route in routes:
        if exchange(*route).total:
            found.update(r for end in route for r in end.placement.ranks.ravel().tolist())
    return tuple(sorted(found))


def _as_bytes(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _fill(
    out: Tensor,
    local: Tensor,
    route: tuple[TensorSpec, TensorSpec],
    orders: Orders,
    arrived: dict[Transfer, Tensor],
) -> None:
    src, dst = route
    origin, starts = src.region(orders.at)[0], dst.region(orders.to)[0]
    for t in orders.arriving:
        part = cut(local, t, origin) if t.source == orders.source else arrived[t]
        cut(out, t, starts).copy_(part)
