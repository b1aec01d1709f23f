"""Number of bytes that a boxing sends from host to host, computed for reports without sending."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from mirrored.comm import Link, Transport
from mirrored.transports.default import current
from mirrored.transports.several_hosts import sent

from ..boxing.steps import Exchange, Move, Step
from ..spec import Coordinate, Placement, TensorSpec


def bytes_between(
    src: TensorSpec, moves: Sequence[Step], beside: bool = False, transport: Transport | None = None
) -> int | None:
    """Return the bytes that all ranks together send from host to host in ``moves``.

    Reports show it, because links between hosts are slower than those within one. Nothing is sent.

    Args:
        src: spec before the first move.
        moves: the moves of a boxing, one after the other.
        beside: whether a reduce-scatter runs at the same time as the program, as that of a gradient
            does; the transport may then use another algorithm, which sends other amounts.
        transport: knows on which hosts ranks are; the one in use if None.

    Returns:
        The number of bytes. None if it is not known: before ranks have communicated they do not
            know each other's hosts, NCCL chooses the messages between GPUs, and the change of a cut
            (such as zigzag) is not computed.
    """
    if not moves:
        return 0
    transport, ends = transport or current(), [src.placement]
    ends += [move.dst.placement for move in moves if isinstance(move, Exchange)]
    if any(placement.type != "cpu" for placement in ends):
        return None
    ranks = tuple(dict.fromkeys(itertools.chain.from_iterable(map(_flat_ranks, ends))))
    of = transport.hosts_of(ranks)
    if of is None:
        return None
    if not max(of):
        return 0
    return _cached_bytes_between(src, tuple(moves), ranks, of, beside, transport.link("cpu"))


@lru_cache(1 << 10)
def _flat_ranks(placement: Placement) -> tuple[int, ...]:
    return tuple(placement.ranks.ravel().tolist())


@lru_cache(1 << 11)
def _cached_bytes_between(
    src: TensorSpec,
    moves: tuple[Step, ...],
    ranks: tuple[int, ...],
    of: tuple[int, ...],
    beside: bool,
    link: Link | None,
) -> int | None:
    """Return ``bytes_between`` for arguments that can be cached.

    ``of`` has for each of ``ranks`` the number of its host.
    """
    host, state, total = dict(zip(ranks, of, strict=True)), src, 0
    for move in moves:
        if isinstance(move, Exchange):
            remote_transfers = (t for t in move.transfers if host[t.source] != host[t.target])
            total += sum(t.sent_bytes(src.dtype.itemsize) for t in remote_transfers)
            state = move.dst
            continue
        sbp = (*state.sbp[: move.axis], move.dst, *state.sbp[move.axis + 1 :])
        after = state.with_sbp(sbp)
        if move.kind == "all_to_all" and (state.layout.is_cut or after.layout.is_cut):
            return None
        for group in _axis_groups(state.placement, move.axis):
            hosts = [host[state.placement.rank_at(at)] for at in group]
            numbers = {name: k for k, name in enumerate(dict.fromkeys(hosts))}
            group_hosts = tuple(numbers[each] for each in hosts)
            total += _group_bytes(move, state, after, group, group_hosts, beside, link)
        state = after
    return total


def _axis_groups(placement: Placement, axis: int) -> Iterator[list[Coordinate]]:
    """Yield the coordinates of the ranks of each group that communicates along ``axis``."""
    grid = placement.shape
    for other_coordinates in itertools.product(
        *(range(1 if a == axis else n) for a, n in enumerate(grid))
    ):
        yield [
            (*other_coordinates[:axis], k, *other_coordinates[axis + 1 :])
            for k in range(grid[axis])
        ]


def _group_bytes(
    move: Move,
    before: TensorSpec,
    after: TensorSpec,
    group: list[Coordinate],
    of: tuple[int, ...],
    beside: bool,
    link: Link | None,
) -> int:
    """Return the bytes from host to host of one move among the ranks at the coordinates ``group``.

    ``before`` and ``after`` are the specs around the move, ``of`` the host of each rank in
    ``group``.
    """
    dtype = before.dtype
    if move.kind == "all_gather":
        return sent.all_gather_bytes(of, [_shard_bytes(before, at) for at in group])
    if move.kind == "all_reduce":
        return sent.all_reduce_bytes(of, math.prod(before.local_shape(group[0])), dtype, link)
    if move.kind == "reduce_scatter":
        return sent.reduce_scatter_bytes(
            of, [_shard_bytes(after, at) for at in group], dtype, beside
        )
    if move.kind == "all_to_all":
        pieces = [[_overlap_bytes(before, a, after, b) for b in group] for a in group]
        return sent.all_to_all_bytes(of, pieces)
    return 0


def _shard_bytes(spec: TensorSpec, coordinate: Coordinate) -> int:
    return math.prod(spec.local_shape(coordinate)) * spec.dtype.itemsize


def _overlap_bytes(before: TensorSpec, a: Coordinate, after: TensorSpec, b: Coordinate) -> int:
    """Return the bytes that the rank at ``a`` sends to that at ``b`` in an all-to-all.

    They are the intersection of the shard of ``a`` under ``before`` and that of ``b`` under
    ``after``.
    """
    items = 1
    for start, size, other_start, other_size in zip(
        *before.region(a), *after.region(b), strict=True
    ):
        items *= max(0, min(start + size, other_start + other_size) - max(start, other_start))
    return items * before.dtype.itemsize
