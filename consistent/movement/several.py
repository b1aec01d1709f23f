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
from mirrored.transports.failures import counts_lacks

from ..boxing.plan import plan
from ..boxing.steps import Move
from ..spec import Coordinate, Split, TensorSpec, piece
from .run import begin, ended, run, run_within
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


@counts_lacks
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
        begun: whether ``begin`` was called for each shard already; then no route leads to another
            placement.
    """
    out: list[Any] = [None] * len(locals_)
    alone, together = _grouped(locals_, routes)
    for i in alone:
        out[i] = _put((run_within if begun else run)(locals_[i], *routes[i]), into, i)
    for kind, ranks, positions, dims, sizes in together:
        xs = [locals_[i] if begun else begin(locals_[i], *routes[i])[0] for i in positions]
        if kind == "all_gather":
            places = None if into is None else [into[i] for i in positions]
            made = current().all_gather_several(xs, dims, sizes, ranks, places)
        else:
            made = current().reduce_scatter_several(xs, dims, sizes, ranks)
            made = [_put(x, into, i) for i, x in zip(positions, made, strict=True)]
        for i, x in zip(positions, made, strict=True):
            out[i] = x
        if not begun:
            ended(*(routes[i] for i in positions))
    return out


class Started:
    """Boxings in flight, as ``start_several`` returns them.

    ``wait()`` returns the boxed shards, in the order of the shards that were given; it may be
    called repeatedly.
    """

    def __init__(self, made: list[Any], waits: list[tuple[list[int], Waitable]]) -> None:
        self._made, self._waits = made, waits

    @counts_lacks
    def wait(self) -> list[Tensor]:
        waits, self._waits = self._waits, []
        for positions, later in waits:
            for i, x in zip(positions, later.wait(), strict=True):
                self._made[i] = x
        return self._made


@counts_lacks
def start_several(locals_: Sequence[Tensor], routes: Sequence[Route]) -> Started:
    """Start boxing each shard from its source to its target spec, and do not wait.

    No route leads to another placement. Shards may not be written to before the results are there.
    """
    xs = [begin(x, *route)[0] for x, route in zip(locals_, routes, strict=True)]
    out: list[Any] = [None] * len(xs)
    alone, together = _grouped(xs, routes)
    waits = []
    for kind, ranks, positions, dims, sizes in together:
        transport = current()
        start = (
            transport.start_all_gather_several
            if kind == "all_gather"
            else transport.start_reduce_scatter_several
        )
        waits.append((list(positions), start([xs[i] for i in positions], dims, sizes, ranks)))
    # After the messages have started, so that they travel meanwhile.
    for i in alone:
        out[i] = run_within(xs[i], *routes[i])
    return Started(out, waits)


def which_travel(routes: Sequence[Route]) -> list[bool]:
    """Return for each route, (src, dst), whether its boxing can overlap with computation.

    It can if it is a single collective, on ranks whose transport sends while they compute. The
    caller then starts it early and waits for it later.
    """
    placements = dict.fromkeys(src.placement for src, _ in routes)
    at = {placement: my_coordinate(placement) for placement in placements}
    found, overlap = list[bool](), dict[tuple, bool]()
    for src, dst in routes:
        cut = _one_move(src, dst, at[src.placement])
        key = (() if cut is None else cut.ranks, src.placement.type)
        if cut is not None and key not in overlap:
            overlap[key] = current().overlaps(*key)
        found.append(cut is not None and overlap[key])
    return found


class _Message(NamedTuple):
    """Tensors that go in one message.

    For each of them it has the position among all shards, the dim, and the sizes of ranks' parts.
    """

    kind: str
    ranks: tuple[int, ...]
    positions: tuple[int, ...]
    dims: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


def _grouped(
    xs: Sequence[Tensor], routes: Sequence[Route]
) -> tuple[tuple[int, ...], tuple[_Message, ...]]:
    """Decide which shards share a message; return (positions of those boxed alone, the messages).

    Shards share one if they are gathered, or reduced and scattered, over the same ranks.
    """
    kinds = tuple((x.dtype if x.layout is torch.strided else None, x.device) for x in xs)
    places = {src.placement: None for src, _ in routes}
    return _messages(tuple(routes), kinds, tuple((p, my_coordinate(p)) for p in places))


@lru_cache(maxsize=1 << 8)
def _messages(
    routes: tuple[Route, ...], kinds: tuple[tuple, ...], places: tuple[tuple, ...]
) -> tuple[tuple[int, ...], tuple[_Message, ...]]:
    """Return the result of ``_grouped`` for arguments that can be cached.

    Args:
        routes: (src, dst) of each shard.
        kinds: (dtype, device) of each shard, with None as the dtype of a sparse one.
        places: pairs of a placement and this rank's coordinate in it.
    """
    at, alone, found = dict(places), [], {}
    for i, ((src, dst), kind) in enumerate(zip(routes, kinds, strict=True)):
        cut = None if kind[0] is None else _one_move(src, dst, at[src.placement])
        if cut is None:
            alone.append(i)
        else:
            found.setdefault((cut.kind, cut.ranks, *kind), []).append((i, cut.dim, cut.sizes))
    messages = [_Message(key[0], key[1], *zip(*each, strict=True)) for key, each in found.items()]
    return tuple(alone), tuple(messages)


def cut_of(route: Route) -> Collective | None:
    """Return the one collective that boxes from src to dst of ``route``, or None."""
    return _one_move(*route, my_coordinate(route[0].placement))


def _put(x: Tensor, into: Sequence[Tensor] | None, i: int) -> Tensor:
    return x if into is None else into[i].copy_(x)


@lru_cache(maxsize=1 << 11)
def _one_move(src: TensorSpec, dst: TensorSpec, at: Coordinate | None) -> Collective | None:
    """Return the one gather or reduce-scatter that converts ``src`` to ``dst``, or None.

    ``at`` is this rank's coordinate. It is a parameter because results are cached by the arguments:
    while a step is recorded, this rank may stand for another one.
    """
    moves = plan(src, dst)
    if at is None or src.placement != dst.placement or len(moves) != 1:
        return None
    (move,) = moves
    if not isinstance(move, Move) or src.placement.shape[move.axis] == 1:
        return None
    parts = src.placement.shape[move.axis]
    if move.kind == "all_gather":
        split, sizes_of = move.src, dst.local_shape(at)
    elif move.kind == "reduce_scatter" and not move.src.is_extreme:
        split, sizes_of = move.dst, src.local_shape(at)
    else:
        return None
    assert isinstance(split, Split)
    if split.cut is not None:  # the items must be reordered as well, which one message cannot do
        return None
    sizes = tuple(piece(sizes_of[split.dim], parts, k)[1] for k in range(parts))
    return Collective(move.kind, src.placement.axis_ranks(move.axis, at), split.dim, sizes)
