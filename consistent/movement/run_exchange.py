"""Carrying out an exchange: one batch of messages, then the parts are put together.

Every rank of either placement takes part, even one with nothing to send; the others get a ``meta``
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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


class Orders(NamedTuple):
    """One rank's share of an exchange: what it sends as ``source``, and gets as ``target``. These
    are both its own rank; a simulated process may stand for two."""

    source: int
    target: int
    at: Coordinate | None  # in the source placement
    to: Coordinate | None  # in the target placement
    going: tuple[Transfer, ...]  # to other ranks
    arriving: tuple[Transfer, ...]  # to this rank, from itself too
    members: Ranks  # who takes part in the messages; empty if nobody sends any


def run_exchange(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """This rank's shard under ``dst``, a new tensor, from its shard under ``src``."""
    orders = orders_of(src, dst)
    origin = src.region(orders.at)[0]
    received = iter(_messages(local, origin, src, dst, orders))
    if orders.to is None:
        return torch.empty(dst.local_shape(None), dtype=dst.dtype, device="meta")
    pieces = [
        (t, cut(local, t, origin) if t.source == orders.source else next(received))
        for t in orders.arriving
    ]
    kind = partial_of(src.sbp)
    return _assemble(pieces, "sum" if kind is None else kind.op, dst, orders.to)


def departing(local: Tensor, src: TensorSpec, dst: TensorSpec) -> list[tuple[int, Tensor]]:
    """What a rank of ``src`` sends, (to, part), for placements without common ranks."""
    orders = orders_of(src, dst)
    origin, wire = src.region(orders.at)[0], wire_of(src, dst)
    return [(t.target, cut(local, t, origin).to(wire)) for t in orders.going]


def arriving(src: TensorSpec, dst: TensorSpec) -> list[tuple[int, tuple[int, ...], torch.device]]:
    """What a rank of ``dst`` receives, (from, shape, device), in the order of ``departing``."""
    orders = orders_of(src, dst)
    return [(t.source, t.sizes, wire_of(src, dst)) for t in orders.arriving]


def assembled(received: Sequence[Tensor], src: TensorSpec, dst: TensorSpec) -> Tensor:
    """This rank's shard under ``dst`` of the parts that ``arriving`` lists."""
    orders, kind = orders_of(src, dst), partial_of(src.sbp)
    assert orders.to is not None
    pieces = list(zip(orders.arriving, received, strict=True))
    return _assemble(pieces, "sum" if kind is None else kind.op, dst, orders.to)


def orders_of(src: TensorSpec, dst: TensorSpec) -> Orders:
    """This rank's share in the exchange from ``src`` to ``dst``."""
    transport = current()
    source, target = transport.rank_in(src.placement), transport.rank_in(dst.placement)
    return _orders(src, dst, source, target)


@lru_cache(maxsize=1 << 11)
def _orders(src: TensorSpec, dst: TensorSpec, source: int, target: int) -> Orders:
    transfers = exchange(src, dst).transfers
    ends = (src.placement, dst.placement)
    at, to = (end.coordinate_of(rank) for end, rank in zip(ends, (source, target), strict=True))
    takes_part = at is not None or to is not None
    sent = any(t.source != t.target for t in transfers)
    members = sorted({r for end in ends for r in end.ranks.ravel().tolist()})
    return Orders(
        source,
        target,
        at,
        to,
        tuple(t for t in transfers if t.source == source and t.target != source),
        tuple(t for t in transfers if t.target == target),
        tuple(members) if takes_part and sent else (),
    )


def _messages(
    local: Tensor,
    origin: Sequence[int],
    src: TensorSpec,
    dst: TensorSpec,
    orders: Orders,
) -> list[Tensor]:
    """The parts that come from other ranks, in the order of ``orders.arriving``."""
    if not orders.members:
        return []
    wire = wire_of(src, dst)
    sends = [(t.target, cut(local, t, origin).to(wire)) for t in orders.going]
    receives = [
        (t.source, t.sizes, src.dtype) for t in orders.arriving if t.source != orders.source
    ]
    return current().exchange(sends, receives, orders.members, wire)


def _assemble(
    pieces: Sequence[tuple[Transfer, Tensor]], op: str, dst: TensorSpec, to: Coordinate
) -> Tensor:
    """The sum of the addends, each put together from its parts, with zeros where P leaves gaps.

    For P(max) and P(min) it is the largest or smallest, with the value that loses against every
    other.
    """
    starts, sizes = dst.region(to)
    to_kind = partial_of(dst.sbp)

    def new() -> Tensor:
        x = torch.empty(sizes, dtype=dst.dtype, device=device_of(dst.placement))
        return x if to_kind is None else x.fill_(identity(dst.dtype, to_kind.op))

    addends: dict[int, Tensor] = {}
    for t, x in pieces:
        if t.addend not in addends:
            addends[t.addend] = new()
        cut(addends[t.addend], t, starts).copy_(x)
    if not addends:
        return new()
    if len(addends) == 1:
        return next(iter(addends.values()))
    return ordered_reduce([addends[k] for k in sorted(addends)], op)


def cut(x: Tensor, t: Transfer, origin: Sequence[int]) -> Tensor:
    """The box of ``t`` in ``x``, whose first element is at ``origin`` of the logical tensor."""
    for dim, (start, size, first) in enumerate(zip(t.starts, t.sizes, origin)):
        x = x.narrow(dim, start - first, size)
    return x


def wire_of(src: TensorSpec, dst: TensorSpec) -> torch.device:
    """Where messages lie; between device types everything passes through the host."""
    same = src.placement.type == dst.placement.type
    return device_of(src.placement) if same else torch.device("cpu")
