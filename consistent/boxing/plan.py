"""Search for the cheapest list of moves from one spec to another.

This is arithmetic only: no tensors, no communication.

Invariants:
* a split appears, changes or goes away only on the innermost axis that splits its dim (no later
  axis splits the same dim), so the pieces along the moving axis are always contiguous;
* an axis becomes P, P(max) or P(min) only if the target has that entry on the axis; from one of
  these entries to another the axis goes through B or S, and no state has two of them;
* if a single axis differs and may move, that one move is the plan; otherwise the plan is the
  cheapest path over the states, or one exchange of what each rank lacks where that sends less (a
  permutation of splits takes three moves and twice the bytes);
* every rank gets the same plan, at any time: measured link speeds decide nothing, costs are
  integers, and ties are broken by the number of moves, then by order.

Between placements there is one exchange: P may be reduced on the source before it, and B and P may
be made from pieces on the target after it. The plan that sends the fewest bytes in total is taken,
then the fastest, then the shortest. No rank holds the whole tensor on the way unless the source or
the target requires it: what is sent is split, or has the SBP of the source or of the target.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ..spec import B, NdSbp, Sbp, Split, TensorSpec, cuts_last, is_cut, misfit, partial_of
from .cost import move_bytes, total_bytes, whole_sizes
from .exchange import exchange
from .steps import Exchange, Move, Step, kind_of

_KEPT = 1 << 11  # cached plans; bounded, because a program with changing sizes keeps adding plans
# No exchange is considered among more ranks than this: the time to list all transfers grows with
# the square of the number of ranks, and each rank would send to very many others.
_EXCHANGING = 256


@lru_cache(maxsize=_KEPT)
def plan(src: TensorSpec, dst: TensorSpec) -> tuple[Step, ...]:
    """Return the steps that take a tensor from ``src`` to ``dst``, in the order in which they run.

    ``S(0)`` to ``B`` gives one all-gather, and a spec to itself gives ``()``. ``movement.run``
    carries the steps out.

    Raises:
        ValueError: the specs differ in shape or dtype, or an SBP does not fit the dtype.
    """
    if src is dst:
        return ()
    _check(src, dst)
    if src.placement != dst.placement:
        return _between(src, dst)
    path = _path(src, dst)
    return _exchanged(src, dst, path) or path


@lru_cache(maxsize=_KEPT)
def _path(src: TensorSpec, dst: TensorSpec) -> tuple[Move, ...]:
    """Return the moves between two specs on one placement, each of which changes one axis."""
    differing = [axis for axis, e in enumerate(src.sbp) if e is not dst.sbp[axis]]
    if len(differing) == 1:
        (axis,) = differing
        if _may_become(src.sbp, axis, dst.sbp[axis]):
            return (_move(src, src.sbp, axis, dst.sbp[axis]),)
    return _cheapest_path(src, dst) if differing else ()


def _exchanged(src: TensorSpec, dst: TensorSpec, path: tuple[Move, ...]) -> tuple[Exchange] | None:
    """Return one exchange to take in place of the moves ``path``, or None if ``path`` is better.

    The exchange must send fewer bytes and be faster. Specs with P entries keep ``path``, because
    collectives reduce the addends while sending them.
    """
    if len(path) < 2 or src.placement.size > _EXCHANGING:
        return None
    if any(entry.is_partial for entry in (*src.sbp, *dst.sbp)):
        return None
    if src.layout.is_cut or dst.layout.is_cut:  # a rank's shard is several boxes
        return None
    made = exchange(src, dst)
    better = made.nbytes < plan_bytes(path) and made.seconds < plan_cost(path)
    return (made,) if better else None


def plan_bytes(moves: Sequence[Step]) -> int:
    """Return the bytes that a plan sends: the sum over its steps of what the busiest rank sends."""
    return sum(move.nbytes for move in moves)


def plan_cost(moves: Sequence[Step]) -> float:
    """Return the estimated seconds of a plan: the sum over its steps."""
    return sum(move.seconds for move in moves)


def boxing_seconds(src: TensorSpec, dst: TensorSpec) -> float:
    """Return the estimated seconds of boxing from ``src`` to ``dst``."""
    return plan_cost(plan(src, dst))


def boxing_bytes(src: TensorSpec, dst: TensorSpec) -> int:
    """Return the bytes that the busiest rank sends in boxing from ``src`` to ``dst``."""
    return plan_bytes(plan(src, dst))


def _cheapest_path(src: TensorSpec, dst: TensorSpec) -> tuple[Move, ...]:
    """Return the cheapest moves on one placement, by Dijkstra's algorithm.

    A node of the graph is a tuple of SBPs, one for each axis, and an edge is a move of one axis.
    """
    entries = _entries(src, dst)
    reached: dict[NdSbp, tuple[NdSbp, Move] | None] = {}
    serial = 0  # breaks ties in favour of the earlier path, so that heapq never compares states
    heap: list[tuple[int, int, int, NdSbp, tuple[NdSbp, Move] | None]] = [(0, 0, 0, src.sbp, None)]
    while True:
        cost, length, _, state, came = heapq.heappop(heap)
        if state in reached:
            continue
        reached[state] = came
        if state == dst.sbp:
            return _trace(reached, state)
        for axis, entry in _neighbours(state, entries):
            after = (*state[:axis], entry, *state[axis + 1 :])
            if after not in reached:
                move, serial = _move(src, state, axis, entry), serial + 1
                # Integers, so that paths of equal cost tie exactly; float sums would not.
                picoseconds = cost + round(move.seconds * 1e12)
                heapq.heappush(heap, (picoseconds, length + 1, serial, after, (state, move)))


def _trace(reached: dict[NdSbp, tuple[NdSbp, Move] | None], state: NdSbp) -> tuple[Move, ...]:
    """Return the moves that led to ``state``; ``reached`` maps a state to (state before, move)."""
    moves = []
    while (came := reached[state]) is not None:
        state, move = came
        moves.append(move)
    return tuple(reversed(moves))


def _entries(src: TensorSpec, dst: TensorSpec) -> list[list[Sbp]]:
    """Return for each axis the SBPs that ``_cheapest_path`` may give it between source and target.

    They are B, the splits of source and target without their cuts, and the split of the largest dim
    that neither of them splits. A P or a cut of the target is allowed only on its own axis, because
    a cut may be made for that axis's number of ranks.
    """
    dims = {entry.dim for entry in (*src.sbp, *dst.sbp) if isinstance(entry, Split)}
    spare = [dim for dim in range(src.ndim) if dim not in dims]
    if spare:
        dims.add(max(spare, key=lambda dim: (src.shape[dim], -dim)))
    common: list[Sbp] = [*map(Split, sorted(dims)), B]
    return [
        [*common, entry] if entry.is_partial or is_cut((entry,)) else common for entry in dst.sbp
    ]


def _neighbours(state: NdSbp, entries: list[list[Sbp]]) -> Iterator[tuple[int, Sbp]]:
    """Yield (axis, SBP) of each single move that is possible from the SBPs ``state``.

    ``entries`` are the SBPs that each axis may get.
    """
    for axis, now in enumerate(state):
        for entry in entries[axis]:
            if entry is not now and _may_become(state, axis, entry):
                yield axis, entry


def _may_become(state: NdSbp, axis: int, entry: Sbp) -> bool:
    """Return whether one move can take ``axis`` to ``entry``, when all axes are as in ``state``.

    * No later axis may split the dim that ``axis`` stops or starts to split.
    * No earlier axis may have a cut, such as zigzag, of the dim that ``axis`` starts to split.
    * All partial axes must be of one kind: P, P(max) or P(min).
    """
    now, later = state[axis], {e.dim for e in state[axis + 1 :] if isinstance(e, Split)}
    if any(isinstance(e, Split) and e.dim in later for e in (now, entry)):
        return False
    if entry.is_split and not cuts_last((*state[:axis], entry)):
        return False
    return not entry.is_partial or partial_of(state) in (None, entry)


def _move(spec: TensorSpec, state: NdSbp, axis: int, entry: Sbp) -> Move:
    """Return the move of ``axis`` from its SBP in ``state`` to ``entry``, with its bytes."""
    grid, names = spec.placement.shape, spec.placement.axes
    whole = whole_sizes(spec.shape, grid, state, axis)
    now = state[axis]
    sent, result = move_bytes(now, entry, whole, grid[axis], spec.dtype.itemsize)
    label = names[axis] if names else ""
    kind = kind_of(now, entry)
    return Move(axis, now, entry, kind, sent, label, result, spec.placement.type)


# -- between placements ----------------------------------------------------------------------------


def _between(src: TensorSpec, dst: TensorSpec) -> tuple[Step, ...]:
    """Plan a change of placement: moves on the source, an exchange, then moves on the target.

    All combinations of specs right before the exchange (``_nearer``) and right after it
    (``_farther``) are compared. The one in which all ranks together send the fewest bytes is taken.
    An exchange moves boxes, so a cut such as zigzag becomes a plain split before it, or is made of
    one after it.
    """
    sources = [(total_sent(src, _path(src, near)), near) for near in _nearer(src, dst)]
    targets = [(total_sent(far, _path(far, dst)), far) for far in _farther(src, dst)]
    ways = [
        (a + b, near, far)
        for (a, near), (b, far) in itertools.product(sources, targets)
        if partial_of(near.sbp) is None or partial_of(far.sbp) in (None, partial_of(near.sbp))
    ]
    best: tuple[tuple[int, int, int], tuple[Step, ...]] | None = None
    for least, near, far in sorted(ways, key=lambda way: way[0]):
        # ``ways`` is sorted by the bytes outside the exchange, a lower bound on the total.
        if best is not None and least > best[0][0]:
            break
        middle = exchange(near, far)
        moves = (*_path(src, near), middle, *_path(far, dst))
        cost = least + middle.total, round(plan_cost(moves) * 1e12), len(moves)
        if best is None or cost < best[0]:
            best = cost, moves
    assert best is not None
    return best[1]


def total_sent(src: TensorSpec, moves: Sequence[Step]) -> int:
    """Return the bytes that all ranks together send in ``moves``, which begin at the spec ``src``.

    No move may change a split into a split of another dim. A change of the cut of a split is
    estimated from above, as if every rank sent as much as the busiest one.
    """
    total, state = 0, src
    for move in moves:
        if isinstance(move, Exchange):
            total, state = total + move.total, move.dst
            continue
        grid, sbp = state.placement.shape, state.sbp
        if move.src.is_split and move.dst.is_split:  # between a custom cut and a plain split
            total += move.nbytes * state.placement.size
        else:
            total += total_bytes(move.src, move.dst, move.axis, grid, sbp, state.nbytes)
        state = state.with_sbp((*sbp[: move.axis], move.dst, *sbp[move.axis + 1 :]))
    return total


def _nearer(src: TensorSpec, dst: TensorSpec) -> Iterator[TensorSpec]:
    """Yield the specs in which a tensor may leave the source placement.

    They are ``src`` itself, and specs that moves on the source reach: P may be reduced (to S or B),
    and B may be sliced first where that makes the reduction smaller.
    """
    if src.layout.is_cut:
        yield from _plainly(src, _nearer(src.plain, dst))
        return
    splits = _cuts(src, dst)
    reduces = any(entry.is_partial for entry in src.sbp)
    entries = [
        [e, *splits, B] if e.is_partial else [e, *splits] if reduces and e.is_broadcast else [e]
        for e in src.sbp
    ]
    for sbp in itertools.product(*entries):
        near = src.with_sbp(sbp)
        if _is_direct(src, near):
            yield near


def _farther(src: TensorSpec, dst: TensorSpec) -> Iterator[TensorSpec]:
    """Yield the specs in which a tensor may arrive on the target placement.

    They are ``dst`` itself, and specs with splits in place of B or P: the target then gathers the
    pieces to B or pads them to P, so that fewer bytes are sent between the placements.
    """
    if dst.layout.is_cut:
        yield from _plainly(dst, _farther(src, dst.plain))
        return
    splits = _cuts(dst, src)
    for sbp in itertools.product(*([e] if e.is_split else [e, *splits] for e in dst.sbp)):
        far = dst.with_sbp(sbp)
        if _is_direct(far, dst):
            yield far


def _plainly(spec: TensorSpec, found: Iterator[TensorSpec]) -> Iterator[TensorSpec]:
    """Filter ``found``, the candidates of ``_nearer`` or ``_farther`` for a spec that has cuts.

    A candidate stays if it equals ``spec`` with balanced splits in place of the cuts, or if one
    move for each axis that differs leads from ``spec`` to it.
    """
    return (each for each in found if each is spec.plain or _is_direct(spec, each))


def _cuts(spec: TensorSpec, other: TensorSpec) -> list[Sbp]:
    """Return the splits that may replace a P or B of ``spec`` around an exchange, to send less.

    They split the largest dim, or a dim that the spec on the other placement splits.
    """
    dims = {entry.dim for entry in other.sbp if isinstance(entry, Split)}
    dims.add(max(range(spec.ndim), key=lambda dim: (spec.shape[dim], -dim), default=0))
    return [Split(dim) for dim in sorted(dims) if dim < spec.ndim and spec.shape[dim] > 1]


def _is_direct(src: TensorSpec, dst: TensorSpec) -> bool:
    """Return whether boxing takes exactly one move for each axis whose SBP differs.

    Then no detour, such as a gather to B on the way from S to S, makes a rank hold something
    larger.
    """
    differing = sum(a is not b for a, b in zip(src.sbp, dst.sbp))
    return len(_path(src, dst)) == differing


def _check(src: TensorSpec, dst: TensorSpec) -> None:
    """Raise the ValueErrors of ``plan``."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        what = "shape" if src.shape != dst.shape else "dtype"
        raise ValueError(
            f"boxing: source and target differ in {what}, and boxing only moves data.\n"
            f"  x is {src}, the target is {dst}.\n"
            f"  {'Reshape' if what == 'shape' else 'Convert'} it first: "
            f"x.{'view(...)' if what == 'shape' else 'to(dtype)'}."
        )
    if fault := misfit(src) or misfit(dst):
        raise ValueError(
            f"boxing: {fault}.\n  x is {src}, the target is {dst}.\n"
            "  Use B or S, or convert it first: x.int(), torch.view_as_real(x)."
        )
