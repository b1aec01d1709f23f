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

from ..spec import (
    B,
    NdSbp,
    Sbp,
    Split,
    TensorSpec,
    cuts_are_innermost,
    invalid_dtype_reason,
    is_cut,
    partial_of,
)
from .cost import move_bytes, total_bytes, whole_sizes
from .exchange import exchange
from .steps import Exchange, Move, Step, kind_of

# Cached plans; bounded, because a program with changing sizes keeps adding plans.
_CACHE_SIZE = 1 << 11
# No exchange is considered among more ranks than this: the time to list all transfers grows with
# the square of the number of ranks, and each rank would send to very many others.
_MAX_EXCHANGE_RANKS = 256


@lru_cache(maxsize=_CACHE_SIZE)
def plan(src: TensorSpec, dst: TensorSpec) -> tuple[Step, ...]:
    """Return the steps that take a tensor from ``src`` to ``dst``, in the order in which they run.

    ``S(0)`` to ``B`` gives one all-gather, and a spec to itself gives ``()``. ``movement.run``
    carries the steps out.

    Raises:
        ValueError: the specs differ in shape or dtype, or an SBP does not fit the dtype.
    """
    if src is dst:
        return ()
    _check_specs(src, dst)
    if src.placement != dst.placement:
        return _plan_between_placements(src, dst)
    path = _path(src, dst)
    return _cheaper_exchange(src, dst, path) or path


@lru_cache(maxsize=_CACHE_SIZE)
def _path(src: TensorSpec, dst: TensorSpec) -> tuple[Move, ...]:
    """Return the moves between two specs on one placement, each of which changes one axis."""
    changed_axes = [axis for axis, e in enumerate(src.sbp) if e is not dst.sbp[axis]]
    if len(changed_axes) == 1:
        (axis,) = changed_axes
        if _may_become(src.sbp, axis, dst.sbp[axis]):
            return (_move(src, src.sbp, axis, dst.sbp[axis]),)
    return _cheapest_path(src, dst) if changed_axes else ()


def _cheaper_exchange(
    src: TensorSpec, dst: TensorSpec, path: tuple[Move, ...]
) -> tuple[Exchange] | None:
    """Return one exchange to take in place of the moves ``path``, or None if ``path`` is better.

    The exchange must send fewer bytes and be faster. Specs with P entries keep ``path``, because
    collectives reduce the addends while sending them.
    """
    if len(path) < 2 or src.placement.size > _MAX_EXCHANGE_RANKS:
        return None
    if any(entry.is_partial for entry in (*src.sbp, *dst.sbp)):
        return None
    if src.layout.is_cut or dst.layout.is_cut:  # a rank's shard is several boxes
        return None
    candidate = exchange(src, dst)
    is_better = candidate.nbytes < plan_bytes(path) and candidate.seconds < plan_seconds(path)
    return (candidate,) if is_better else None


def plan_bytes(moves: Sequence[Step]) -> int:
    """Return the bytes that a plan sends: the sum over its steps of what the busiest rank sends."""
    return sum(move.nbytes for move in moves)


def plan_seconds(moves: Sequence[Step]) -> float:
    """Return the estimated seconds of a plan: the sum over its steps."""
    return sum(move.seconds for move in moves)


def boxing_seconds(src: TensorSpec, dst: TensorSpec) -> float:
    """Return the estimated seconds of boxing from ``src`` to ``dst``."""
    return plan_seconds(plan(src, dst))


def boxing_bytes(src: TensorSpec, dst: TensorSpec) -> int:
    """Return the bytes that the busiest rank sends in boxing from ``src`` to ``dst``."""
    return plan_bytes(plan(src, dst))


def _cheapest_path(src: TensorSpec, dst: TensorSpec) -> tuple[Move, ...]:
    """Return the cheapest moves on one placement, by Dijkstra's algorithm.

    A node of the graph is a tuple of SBPs, one for each axis, and an edge is a move of one axis.
    """
    entries = _candidate_entries(src, dst)
    reached: dict[NdSbp, tuple[NdSbp, Move] | None] = {}
    serial = 0  # breaks ties in favour of the earlier path, so that heapq never compares states
    heap: list[tuple[int, int, int, NdSbp, tuple[NdSbp, Move] | None]] = [(0, 0, 0, src.sbp, None)]
    while True:
        cost, length, _, state, predecessor = heapq.heappop(heap)
        if state in reached:
            continue
        reached[state] = predecessor
        if state == dst.sbp:
            return _backtrack(reached, state)
        for axis, entry in _neighbours(state, entries):
            next_state = (*state[:axis], entry, *state[axis + 1 :])
            if next_state not in reached:
                move, serial = _move(src, state, axis, entry), serial + 1
                # Integers, so that paths of equal cost tie exactly; float sums would not.
                picoseconds = cost + round(move.seconds * 1e12)
                heapq.heappush(heap, (picoseconds, length + 1, serial, next_state, (state, move)))


def _backtrack(reached: dict[NdSbp, tuple[NdSbp, Move] | None], state: NdSbp) -> tuple[Move, ...]:
    """Return the moves that led to ``state``; ``reached`` maps a state to (state before, move)."""
    moves = []
    while (predecessor := reached[state]) is not None:
        state, move = predecessor
        moves.append(move)
    return tuple(reversed(moves))


def _candidate_entries(src: TensorSpec, dst: TensorSpec) -> list[list[Sbp]]:
    """Return for each axis the SBPs that ``_cheapest_path`` may give it between source and target.

    They are B, the splits of source and target without their cuts, and the split of the largest dim
    that neither of them splits. A P or a cut of the target is allowed only on its own axis, because
    a cut may be made for that axis's number of ranks.
    """
    dims = {entry.dim for entry in (*src.sbp, *dst.sbp) if isinstance(entry, Split)}
    unsplit_dims = [dim for dim in range(src.ndim) if dim not in dims]
    if unsplit_dims:
        dims.add(max(unsplit_dims, key=lambda dim: (src.shape[dim], -dim)))
    common: list[Sbp] = [*map(Split, sorted(dims)), B]
    return [
        [*common, entry] if entry.is_partial or is_cut((entry,)) else common for entry in dst.sbp
    ]


def _neighbours(state: NdSbp, entries: list[list[Sbp]]) -> Iterator[tuple[int, Sbp]]:
    """Yield (axis, SBP) of each single move that is possible from the SBPs ``state``.

    ``entries`` are the SBPs that each axis may get.
    """
    for axis, current in enumerate(state):
        for entry in entries[axis]:
            if entry is not current and _may_become(state, axis, entry):
                yield axis, entry


def _may_become(state: NdSbp, axis: int, entry: Sbp) -> bool:
    """Return whether one move can take ``axis`` to ``entry``, when all axes are as in ``state``.

    * No later axis may split the dim that ``axis`` stops or starts to split.
    * No earlier axis may have a cut, such as zigzag, of the dim that ``axis`` starts to split.
    * All partial axes must be of one kind: P, P(max) or P(min).
    """
    current, later_dims = state[axis], {e.dim for e in state[axis + 1 :] if isinstance(e, Split)}
    if any(isinstance(e, Split) and e.dim in later_dims for e in (current, entry)):
        return False
    if entry.is_split and not cuts_are_innermost((*state[:axis], entry)):
        return False
    return not entry.is_partial or partial_of(state) in (None, entry)


def _move(spec: TensorSpec, state: NdSbp, axis: int, entry: Sbp) -> Move:
    """Return the move of ``axis`` from its SBP in ``state`` to ``entry``, with its bytes."""
    grid, names = spec.placement.shape, spec.placement.axes
    whole = whole_sizes(spec.shape, grid, state, axis)
    current = state[axis]
    sent_bytes, result_bytes = move_bytes(current, entry, whole, grid[axis], spec.dtype.itemsize)
    label = names[axis] if names else ""
    kind = kind_of(current, entry)
    return Move(axis, current, entry, kind, sent_bytes, label, result_bytes, spec.placement.type)


# -- between placements ----------------------------------------------------------------------------


def _plan_between_placements(src: TensorSpec, dst: TensorSpec) -> tuple[Step, ...]:
    """Plan a change of placement: moves on the source, an exchange, then moves on the target.

    All combinations of specs right before the exchange (``_departure_specs``) and right after it
    (``_arrival_specs``) are compared. The one in which all ranks together send the fewest bytes is
    taken. An exchange moves boxes, so a cut such as zigzag becomes a plain split before it, or is
    made of one after it.
    """
    sources = [
        (total_sent(src, _path(src, departure)), departure)
        for departure in _departure_specs(src, dst)
    ]
    targets = [
        (total_sent(arrival, _path(arrival, dst)), arrival) for arrival in _arrival_specs(src, dst)
    ]
    candidates = [
        (a + b, departure, arrival)
        for (a, departure), (b, arrival) in itertools.product(sources, targets)
        if partial_of(departure.sbp) is None
        or partial_of(arrival.sbp) in (None, partial_of(departure.sbp))
    ]
    cheapest: tuple[tuple[int, int, int], tuple[Step, ...]] | None = None
    for outer_bytes, departure, arrival in sorted(candidates, key=lambda candidate: candidate[0]):
        # They are sorted by the bytes outside the exchange, a lower bound on the total.
        if cheapest is not None and outer_bytes > cheapest[0][0]:
            break
        exchange_step = exchange(departure, arrival)
        moves = (*_path(src, departure), exchange_step, *_path(arrival, dst))
        cost = outer_bytes + exchange_step.total, round(plan_seconds(moves) * 1e12), len(moves)
        if cheapest is None or cost < cheapest[0]:
            cheapest = cost, moves
    assert cheapest is not None
    return cheapest[1]


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


def _departure_specs(src: TensorSpec, dst: TensorSpec) -> Iterator[TensorSpec]:
    """Yield the specs in which a tensor may leave the source placement.

    They are ``src`` itself, and specs that moves on the source reach: P may be reduced (to S or B),
    and B may be sliced first where that makes the reduction smaller.
    """
    if src.layout.is_cut:
        yield from _filter_for_cuts(src, _departure_specs(src.plain, dst))
        return
    splits = _candidate_splits(src, dst)
    has_partial = any(entry.is_partial for entry in src.sbp)
    entries = [
        [e, *splits, B] if e.is_partial else [e, *splits] if has_partial and e.is_broadcast else [e]
        for e in src.sbp
    ]
    for sbp in itertools.product(*entries):
        departure = src.with_sbp(sbp)
        if _is_direct(src, departure):
            yield departure


def _arrival_specs(src: TensorSpec, dst: TensorSpec) -> Iterator[TensorSpec]:
    """Yield the specs in which a tensor may arrive on the target placement.

    They are ``dst`` itself, and specs with splits in place of B or P: the target then gathers the
    pieces to B or pads them to P, so that fewer bytes are sent between the placements.
    """
    if dst.layout.is_cut:
        yield from _filter_for_cuts(dst, _arrival_specs(src, dst.plain))
        return
    splits = _candidate_splits(dst, src)
    for sbp in itertools.product(*([e] if e.is_split else [e, *splits] for e in dst.sbp)):
        arrival = dst.with_sbp(sbp)
        if _is_direct(arrival, dst):
            yield arrival


def _filter_for_cuts(spec: TensorSpec, candidates: Iterator[TensorSpec]) -> Iterator[TensorSpec]:
    """Filter the ``candidates`` of ``_departure_specs`` or ``_arrival_specs`` for a spec with cuts.

    A candidate stays if it equals ``spec`` with balanced splits in place of the cuts, or if one
    move for each axis that differs leads from ``spec`` to it.
    """
    return (each for each in candidates if each is spec.plain or _is_direct(spec, each))


def _candidate_splits(spec: TensorSpec, other_spec: TensorSpec) -> list[Sbp]:
    """Return the splits that may replace a P or B of ``spec`` around an exchange, to send less.

    They split the largest dim, or a dim that the spec on the other placement splits.
    """
    dims = {entry.dim for entry in other_spec.sbp if isinstance(entry, Split)}
    dims.add(max(range(spec.ndim), key=lambda dim: (spec.shape[dim], -dim), default=0))
    return [Split(dim) for dim in sorted(dims) if dim < spec.ndim and spec.shape[dim] > 1]


def _is_direct(src: TensorSpec, dst: TensorSpec) -> bool:
    """Return whether boxing takes exactly one move for each axis whose SBP differs.

    Then no detour, such as a gather to B on the way from S to S, makes a rank hold something
    larger.
    """
    changed_count = sum(a is not b for a, b in zip(src.sbp, dst.sbp))
    return len(_path(src, dst)) == changed_count


def _check_specs(src: TensorSpec, dst: TensorSpec) -> None:
    """Raise the ValueErrors of ``plan``."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        attribute = "shape" if src.shape != dst.shape else "dtype"
        raise ValueError(
            f"boxing: source and target differ in {attribute}, and boxing only moves data.\n"
            f"  x is {src}, the target is {dst}.\n"
            f"  {'Reshape' if attribute == 'shape' else 'Convert'} it first: "
            f"x.{'view(...)' if attribute == 'shape' else 'to(dtype)'}."
        )
    if fault := invalid_dtype_reason(src) or invalid_dtype_reason(dst):
        raise ValueError(
            f"boxing: {fault}.\n  x is {src}, the target is {dst}.\n"
            "  Use B or S, or convert it first: x.int(), torch.view_as_real(x)."
        )
