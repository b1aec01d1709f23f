"""Execution of exchanges, in which each rank sends the parts that others need directly to them.

Parts of several tensors for one rank go in one message:

```
            tensor a          tensor b             one message
rank 0      a[0:2] to 2       b[0:1] to 2    --->  a[0:2] b[0:1]  --->  rank 2
rank 1      a[2:4] to 2                      --->  a[2:4]         --->  rank 2
```

Parts that a rank has already are copied, and not sent. Every rank of a placement takes part, even
one with nothing to send; the others get a ``meta`` tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mirrored.comm import Ranks
from mirrored.reduction import identity, ordered_reduce
from mirrored.transports.default import current

from ..boxing.exchange import exchange
from ..boxing.steps import Transfer
from ..spec import Coordinate, TensorSpec, partial_of
from .world import device_of

Route = tuple[TensorSpec, TensorSpec]
Message = tuple[int, tuple[int, ...], torch.dtype]  # source, shape, dtype


def run_exchange(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """Return this rank's shard under ``dst``, a new tensor; ``local`` is its shard under ``src``.

    Each rank sends the parts that others need directly to them, usually to another placement.
    """
    return run_together([local], [(src, dst)])[0]


def run_together(
    locals_: Sequence[Tensor], routes: Sequence[Route], into: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Exchange parts of several tensors at once, in one batch of messages; return the new shards.

    Args:
        locals_: this rank's shards.
        routes: (src, dst) of each, all between devices of the same kinds.
        into: tensors to write the new shards into, if no spec is partial. Where ``into[i]`` is
            ``locals_[i]`` itself, nothing is written: this rank keeps its shard.
    """
    batch = batch_of(*routes)
    received: list[Tensor] = []
    # ``incoming`` too: a simulated process may stand for two ranks, a source and a target. Parts
    # that a real target has itself then arrive as messages.
    if batch.takes_part or batch.incoming:
        sends = batch.outgoing_messages(locals_)
        received = current().exchange(sends, batch.incoming, batch.members, batch.wire_device)
    return batch.assemble(received, locals_, into)


class RankTransfers(NamedTuple):
    """What one rank sends and receives in the exchange of one tensor.

    ``source`` and ``target`` are the ranks as which it sends and receives. Both are its own rank,
    except in a simulated process, which may stand for two.
    """

    source: int
    target: int
    source_coordinate: Coordinate | None  # in the source placement
    target_coordinate: Coordinate | None  # in the target placement
    sends: tuple[Transfer, ...]  # to other ranks
    receives: tuple[Transfer, ...]  # to this rank, from itself too


class Batch:
    """The messages that one rank sends and receives when several tensors are exchanged at once.

    The parts for one rank are sent as one message: the concatenation of their bytes in the order of
    the tensors, or a single part as it is. ``outgoing_messages`` makes the messages, and
    ``assemble`` makes shards of those that arrive.
    """

    def __init__(self, routes: Sequence[Route], orders: Sequence[RankTransfers]) -> None:
        self._routes, self._orders = routes, orders
        self.members = _member_ranks(routes)
        """The ranks between which anything is sent; the same on every rank."""
        self.takes_part = any(
            rank in self.members for transfers in orders for rank in transfers[:2]
        )
        """True if this rank is one of ``members``."""
        # Source rank -> (index of the route, index of the transfer) of each part that it sends.
        self._incoming_parts: dict[int, list[tuple[int, int]]] = {}
        for i, transfers in enumerate(orders):
            for k, t in enumerate(transfers.receives):
                if t.source != transfers.source:
                    self._incoming_parts.setdefault(t.source, []).append((i, k))

    @property
    def wire_device(self) -> torch.device:
        """Device of the messages: the host's if the exchange is between device types."""
        src, dst = (end.placement for end in self._routes[0])
        return device_of(src) if src.type == dst.type else torch.device("cpu")

    def outgoing_messages(self, locals_: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the messages that this rank sends, as (target rank, message), from its shards."""
        outgoing: dict[int, list[Tensor]] = {}
        for i, transfers in enumerate(self._orders):
            if transfers.sends:
                origin = self._routes[i][0].region(transfers.source_coordinate)[0]
                for t in transfers.sends:
                    outgoing.setdefault(t.target, []).append(_box_view(locals_[i], t, origin))
        return [(to, _pack_parts(parts).to(self.wire_device)) for to, parts in outgoing.items()]

    @cached_property
    def incoming(self) -> list[Message]:
        """What this rank receives, as (source rank, shape, dtype) of each message."""
        messages: list[Message] = []
        for source, parts in self._incoming_parts.items():
            (i, k), *other_parts = parts
            if other_parts:
                messages.append((source, (sum(map(self._part_bytes, parts)),), torch.uint8))
            else:
                messages.append(
                    (source, self._orders[i].receives[k].sizes, self._routes[i][0].dtype)
                )
        return messages

    def assemble(
        self,
        received: Sequence[Tensor],
        locals_: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return this rank's shards under the target specs, assembled from their parts.

        The parts come from ``received``, the messages in the order of ``incoming``, and from
        ``locals_``. ``into`` is as in ``run_together``.
        """
        parts: dict[tuple[int, int], Tensor] = {}
        for message, places in zip(received, self._incoming_parts.values(), strict=True):
            if len(places) == 1:
                parts[places[0]] = message
                continue
            for place, x in zip(
                places, message.split([*map(self._part_bytes, places)]), strict=True
            ):
                (src, _), t = self._routes[place[0]], self._orders[place[0]].receives[place[1]]
                parts[place] = x.view(src.dtype).view(t.sizes)
        shards = []
        for i, transfers in enumerate(self._orders):
            out = None if into is None else into[i]
            if out is None or (transfers.target_coordinate is not None and out is not locals_[i]):
                out = self._assemble_shard(i, parts, locals_, out)
            shards.append(out)
        return shards

    def _part_bytes(self, place: tuple[int, int]) -> int:
        """Return the bytes of the part ``place``: (index of the tensor, index of the transfer)."""
        i, k = place
        return math.prod(self._orders[i].receives[k].sizes) * self._routes[i][0].dtype.itemsize

    def _assemble_shard(
        self,
        i: int,
        parts: dict[tuple[int, int], Tensor],
        locals_: Sequence[Tensor],
        out: Tensor | None,
    ) -> Tensor:
        """Return the shard of the ``i``-th tensor, from received ``parts`` and this rank's own."""
        (src, dst), transfers = self._routes[i], self._orders[i]
        if transfers.target_coordinate is None:
            return torch.empty(dst.local_shape(None), dtype=dst.dtype, device="meta")
        origin = src.region(transfers.source_coordinate)[0]
        pieces = [
            (
                t,
                _box_view(locals_[i], t, origin) if t.source == transfers.source else parts[i, k],
            )
            for k, t in enumerate(transfers.receives)
        ]
        source_partial = partial_of(src.sbp)
        return _assemble_parts(
            pieces,
            "sum" if source_partial is None else source_partial.op,
            dst,
            transfers.target_coordinate,
            out,
        )


def batch_of(*routes: Route, is_source: bool = True, is_target: bool = True) -> Batch:
    """Return what this rank sends and receives when tensors are exchanged along ``routes``.

    A route is (src, dst). ``is_source`` and ``is_target`` say whether the call is for sending and
    for receiving; ``between`` does the two in separate calls.
    """
    rank_in = current().rank_in
    ranks = tuple(
        (rank_in(src.placement) if is_source else -1, rank_in(dst.placement) if is_target else -1)
        for src, dst in routes
    )
    return _cached_batch(routes, ranks)


@lru_cache(maxsize=1 << 10)
def _cached_batch(routes: tuple[Route, ...], ranks: tuple[tuple[int, int], ...]) -> Batch:
    return Batch(routes, [_orders(*route, *own) for route, own in zip(routes, ranks, strict=True)])


def _orders(src: TensorSpec, dst: TensorSpec, source: int, target: int) -> RankTransfers:
    """Return what a rank sends as ``source`` and receives as ``target``; -1 if it does not."""
    transfers = exchange(src, dst).transfers
    return RankTransfers(
        source,
        target,
        src.placement.coordinate_of(source),
        dst.placement.coordinate_of(target),
        tuple(t for t in transfers if t.source == source and t.target != source),
        tuple(t for t in transfers if t.target == target),
    )


def _member_ranks(routes: Sequence[Route]) -> Ranks:
    """Return the ranks that take part in the exchanges, the same on every rank.

    They are all ranks of the placements between which anything is sent.
    """
    members: set[int] = set()
    for route in routes:
        if exchange(*route).total:
            members.update(r for end in route for r in end.placement.ranks.ravel().tolist())
    return tuple(sorted(members))


def _pack_parts(parts: list[Tensor]) -> Tensor:
    """Return one message that contains ``parts``: their bytes, or a single part itself."""
    return parts[0] if len(parts) == 1 else torch.cat([_as_bytes(x) for x in parts])


def _as_bytes(x: Tensor) -> Tensor:
    # Lazy conjugation and negation are not in the bytes, so carry them out first.
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _assemble_parts(
    pieces: Sequence[tuple[Transfer, Tensor]],
    op: str,
    dst: TensorSpec,
    to: Coordinate,
    out: Tensor | None,
) -> Tensor:
    """Assemble a shard of ``dst`` from its parts, and reduce if several addends arrive.

    Elements that no part covers get the identity of the reduction if the target is P (zero), P(max)
    or P(min).

    Args:
        pieces: (transfer, its data) of each part.
        op: "sum", "max" or "min", by which addends are combined.
        dst: spec of the target.
        to: coordinate of this rank in the target's placement.
        out: tensor to write a shard that has one addend into, or None.
    """
    starts, sizes = dst.region(to)
    target_partial = partial_of(dst.sbp)

    def new_shard() -> Tensor:
        if out is not None:
            return out
        x = torch.empty(sizes, dtype=dst.dtype, device=device_of(dst.placement))
        return x if target_partial is None else x.fill_(identity(dst.dtype, target_partial.op))

    addends: dict[int, Tensor] = {}
    for t, x in pieces:
        if t.addend not in addends:
            addends[t.addend] = new_shard()
        _box_view(addends[t.addend], t, starts).copy_(x)
    if not addends:
        return new_shard()
    if len(addends) == 1:
        return next(iter(addends.values()))
    # In a fixed order, so that every rank rounds in the same way.
    return ordered_reduce([addends[k] for k in sorted(addends)], op)


def _box_view(x: Tensor, t: Transfer, origin: Sequence[int]) -> Tensor:
    """Return a view of the box of the transfer ``t`` in ``x``, the shard that sends or gets it.

    ``origin`` is the index of the shard's first element in the logical tensor.
    """
    for dim, (start, size, first) in enumerate(zip(t.starts, t.sizes, origin)):
        x = x.narrow(dim, start - first, size)
    return x
