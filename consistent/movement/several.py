"""Boxing of several shards at once, without autograd.

Shards that are gathered, or reduced and scattered, over the same ranks go in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrored.comm import Waitable
from mirrored.transports.default import current
from mirrored.transports.failures import counts_out_of_memory

from ..boxing.plan import plan
from ..boxing.steps import Move
from ..spec import Coordinate, Split, TensorSpec, piece
from .run import begin_boxing, notify_end, run, run_within
from .run_exchange import Route
from .world import my_coordinate


class Collective(NamedTuple):
    """One collective that does a whole boxing.

    ``kind`` is "all_gather" or "reduce_scatter" (or "all_reduce" of a codec), and ``sizes`` are the
    sizes of the ranks' parts along ``dim``.
    """

    kind: str
    ranks: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


@counts_out_of_memory
def run_several(
    locals_: Sequence[Tensor],
    routes: Sequence[Route],
    into: Sequence[Tensor] | None = None,
    begun: bool = False,
) -> list[Tensor]:
    """Box each shard from its source to its target spec, in as few messages as possible.

    Args:
        locals_: this rank's shards.
        routes: (src, dst) of each, which differ.
        into: contiguous tensors to write the results into, which are then returned.
        begun: whether ``begin_boxing`` was called for each shard already; then no route leads to
            another placement.
    """
    out: list[Any] = [None] * len(locals_)
    single_positions, messages = _group_by_message(locals_, routes)
    for i in single_positions:
        out[i] = _copy_into((run_within if begun else run)(locals_[i], *routes[i]), into, i)
    for kind, ranks, positions, dims, sizes in messages:
        xs = [locals_[i] if begun else begin_boxing(locals_[i], *routes[i])[0] for i in positions]
        if kind == "all_gather":
            places = None if into is None else [into[i] for i in positions]
            results = current().all_gather_several(xs, dims, sizes, ranks, places)
        else:
            results = current().reduce_scatter_several(xs, dims, sizes, ranks)
            results = [_copy_into(x, into, i) for i, x in zip(positions, results, strict=True)]
        for i, x in zip(positions, results, strict=True):
            out[i] = x
        if not begun:
            notify_end(*(routes[i] for i in positions))
    return out


class StartedBoxings:
    """Boxings in flight, as ``start_several`` returns them.

    ``wait()`` returns the boxed shards, in the order of the shards that were given; it may be
    called repeatedly.
    """

    def __init__(self, results: list[Any], waits: list[tuple[list[int], Waitable]]) -> None:
        self._results, self._waits = results, waits

    @counts_out_of_memory
    def wait(self) -> list[Tensor]:
        waits, self._waits = self._waits, []
        for positions, handle in waits:
            for i, x in zip(positions, handle.wait(), strict=True):
                self._results[i] = x
        return self._results


@counts_out_of_memory
def start_several(locals_: Sequence[Tensor], routes: Sequence[Route]) -> StartedBoxings:
    """Start boxing each shard from its source to its target spec, and do not wait.

    No route leads to another placement. Shards may not be written to before the results are there.
    """
    xs = [begin_boxing(x, *route)[0] for x, route in zip(locals_, routes, strict=True)]
    out: list[Any] = [None] * len(xs)
    single_positions, messages = _group_by_message(xs, routes)
    waits = []
    for kind, ranks, positions, dims, sizes in messages:
        transport = current()
        start = (
            transport.start_all_gather_several
            if kind == "all_gather"
            else transport.start_reduce_scatter_several
        )
        waits.append((list(positions), start([xs[i] for i in positions], dims, sizes, ranks)))
    # After the messages have started, so that they travel meanwhile.
    for i in single_positions:
        out[i] = run_within(xs[i], *routes[i])
    return StartedBoxings(out, waits)


def overlap_flags(routes: Sequence[Route]) -> list[bool]:
    """Return for each route, (src, dst), whether its boxing can overlap with computation.

    It can if it is a single collective, on ranks whose transport sends while they compute. The
    caller then starts it early and waits for it later.
    """
    placements = dict.fromkeys(src.placement for src, _ in routes)
    coordinates = {placement: my_coordinate(placement) for placement in placements}
    flags, overlaps_by_group = list[bool](), dict[tuple, bool]()
    for src, dst in routes:
        collective = _single_collective(src, dst, coordinates[src.placement])
        key = (() if collective is None else collective.ranks, src.placement.type)
        if collective is not None and key not in overlaps_by_group:
            overlaps_by_group[key] = current().overlaps(*key)
        flags.append(collective is not None and overlaps_by_group[key])
    return flags


class _Message(NamedTuple):
    """Tensors that go in one message.

    For each of them it has the position among all shards, the dim, and the sizes of ranks' parts.
    """

    kind: str
    ranks: tuple[int, ...]
    positions: tuple[int, ...]
    dims: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


def _group_by_message(
    xs: Sequence[Tensor], routes: Sequence[Route]
) -> tuple[tuple[int, ...], tuple[_Message, ...]]:
    """Decide which shards share a message; return (positions boxed singly, the messages).

    Shards share one if they are gathered, or reduced and scattered, over the same ranks.
    """
    kinds = tuple((x.dtype if x.layout is torch.strided else None, x.device) for x in xs)
    places = {src.placement: None for src, _ in routes}
    return _cached_messages(tuple(routes), kinds, tuple((p, my_coordinate(p)) for p in places))


@lru_cache(maxsize=1 << 8)
def _cached_messages(
    routes: tuple[Route, ...], kinds: tuple[tuple, ...], places: tuple[tuple, ...]
) -> tuple[tuple[int, ...], tuple[_Message, ...]]:
    """Return the result of ``_group_by_message`` for arguments that can be cached.

    Args:
        routes: (src, dst) of each shard.
        kinds: (dtype, device) of each shard, with None as the dtype of a sparse one.
        places: pairs of a placement and this rank's coordinate in it.
    """
    coordinates, single_positions, entries_by_key = dict(places), [], {}
    for i, ((src, dst), kind) in enumerate(zip(routes, kinds, strict=True)):
        collective = (
            None if kind[0] is None else _single_collective(src, dst, coordinates[src.placement])
        )
        if collective is None:
            single_positions.append(i)
        else:
            entries_by_key.setdefault((collective.kind, collective.ranks, *kind), []).append(
                (i, collective.dim, collective.sizes)
            )
    messages = [
        _Message(key[0], key[1], *zip(*entries, strict=True))
        for key, entries in entries_by_key.items()
    ]
    return tuple(single_positions), tuple(messages)


def single_collective_of(route: Route) -> Collective | None:
    """Return the one collective that boxes from src to dst of ``route``, or None."""
    return _single_collective(*route, my_coordinate(route[0].placement))


def _copy_into(x: Tensor, into: Sequence[Tensor] | None, i: int) -> Tensor:
    return x if into is None else into[i].copy_(x)


@lru_cache(maxsize=1 << 11)
def _single_collective(
    src: TensorSpec, dst: TensorSpec, coordinate: Coordinate | None
) -> Collective | None:
    """Return the one gather or reduce-scatter that converts ``src`` to ``dst``, or None.

    ``coordinate`` is this rank's. It is a parameter because results are cached by the arguments:
    while a step is recorded, this rank may stand for another one.
    """
    moves = plan(src, dst)
    if coordinate is None or src.placement != dst.placement or len(moves) != 1:
        return None
    (move,) = moves
    if not isinstance(move, Move) or src.placement.shape[move.axis] == 1:
        return None
    parts = src.placement.shape[move.axis]
    if move.kind == "all_gather":
        split_sbp, whole_shape = move.src, dst.local_shape(coordinate)
    elif move.kind == "reduce_scatter" and not move.src.is_extreme:
        split_sbp, whole_shape = move.dst, src.local_shape(coordinate)
    else:
        return None
    assert isinstance(split_sbp, Split)
    # With a cut the items must be reordered as well, which one message cannot do.
    if split_sbp.cut is not None:
        return None
    sizes = tuple(piece(whole_shape[split_sbp.dim], parts, k)[1] for k in range(parts))
    return Collective(
        move.kind, src.placement.axis_ranks(move.axis, coordinate), split_sbp.dim, sizes
    )
