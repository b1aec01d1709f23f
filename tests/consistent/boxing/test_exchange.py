"""Moves between placements: plans, values, gradients of gradients, and the bytes that are sent."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.boxing.exchange import exchange
from consistent.boxing.plan import plan, plan_bytes, total_sent
from consistent.boxing.steps import Exchange, plan_text
from consistent.movement.boxed import box
from consistent.movement.check_mode import check_mode
from consistent.movement.run import run
from consistent.movement.world import whole_on_world
from consistent.spec import EXTREMES, B, NdSbp, P, Placement, S, Sbp, TensorSpec, fits_dtype
from mirrored import counting
from tests.ranks import ALL, RankError, pool, simulate
from tests.reference import gather, in_grid_order, scatter, shard_at, whole_numbers
from tests.strategies import grids, nd_sbps, shapes

SMALL, LARGE = (7, 5), (7000, 5000)
WORLD = 4

# Disjoint, overlapping, subset, equal, permuted, other grids: pairs of these are all of it.
GRIDS = [
    [0], [3], [0, 1], [1, 0], [2, 3], [1, 2, 3], [0, 1, 2, 3], [3, 1, 0, 2],
    [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[1, 2]],
]  # fmt: skip
PAIRS = [(a, b) for a, b in itertools.product(GRIDS, GRIDS) if a != b]
from_each = pytest.mark.parametrize("a", GRIDS, ids=str)


def has_one_axis(ranks) -> bool:
    return not isinstance(ranks[0], list)


def others(a) -> list[Any]:
    """Where tensors on ``a`` go."""
    return [b for b in GRIDS if b != a]


def on(ranks, sbp, shape=SMALL, dtype=torch.float64) -> TensorSpec:
    return TensorSpec.of(Placement("cpu", ranks), sbp, shape, dtype)


def all_sbps(ranks) -> list[NdSbp]:
    axes = Placement("cpu", ranks).ndim
    return list(itertools.product((B, P, S(0), S(1)), repeat=axes))


def cases(a, b, sizes) -> list[tuple[TensorSpec, TensorSpec]]:
    """All pairs of SBPs between two placements."""
    return [
        (on(a, s, shape), on(b, t, shape))
        for shape in sizes
        for s, t in itertools.product(all_sbps(a), all_sbps(b))
    ]


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "src", "b", "dst", "line"),
    [
        ([0, 1], S(0), [1, 2, 3], S(0), "S(0) -exchange(0, 1 to 1, 2, 3)-> S(0)"),
        ([0, 1], B, [2, 3], B, "B -exchange(0, 1 to 2, 3)-> B"),
        # Everyone keeps what they have.
        ([0, 1], P, [1, 0], P, "P -exchange(0, 1 to 1, 0)-> P"),
        # Addends go where they are summed: as many bytes as reducing on the source first, one step.
        ([0, 1], P, [2, 3], S(0), "P -exchange(0, 1 to 2, 3)-> S(0)"),
        # One copy over the wire between the placements.
        ([0, 1], P, [2, 3], B, "P -exchange(0, 1 to 2, 3)-> S(0) -all_gather(0)-> B"),
        (
            [[0, 1], [2, 3]], (P, P), [0, 1], S(0),
            "(P, P) -reduce_scatter(1)-> (P, S(0)) -exchange([0, 1], [2, 3] to 0, 1)-> S(0)",
        ),
    ],
)  # fmt: skip
def test_plan_reduces_on_the_source_and_spreads_on_the_target(a, src, b, dst, line):
    near, far = on(a, src, LARGE), on(b, dst, LARGE)
    assert plan_text(near.sbp, plan(near, far)) == line


def test_each_part_comes_from_one_rank_and_from_oneself_first():
    moves = exchange(on([0, 1], S(0)), on([1, 2, 3], S(0)))
    assert [str(t) for t in moves.transfers] == [
        "0 -> 1 [0:3, 0:5]",
        "0 -> 2 [3:4, 0:5]",
        "1 -> 2 [4:5, 0:5]",
        "1 -> 3 [5:7, 0:5]",
    ]
    moves = exchange(on([0, 1], B), on([1, 2], B))
    assert [str(t) for t in moves.transfers] == ["1 -> 1 [0:7, 0:5]", "0 -> 2 [0:7, 0:5]"]


def test_replicas_share_the_sending():
    moves = exchange(on([0, 1], B, (8, 8)), on([2, 3, 4, 5], S(0), (8, 8)))
    assert [t.source for t in moves.transfers] == [0, 1, 0, 1]
    assert moves.nbytes == 4 * 8 * 8


@pytest.mark.parametrize(
    ("a", "src", "b", "dst"),
    [
        ([0, 1], P, [1, 0], P),
        ([0, 1], P, [0, 1, 2], P),
        ([0, 1], S(0), [2, 0, 1], P),
        ([0, 1, 2], B, [0, 1], S(0)),
        ([[0, 1], [2, 3]], (S(0), S(0)), [0, 1, 2, 3], S(0)),
        ([0, 1], B, [[0, 1]], (B, S(1))),
    ],
)
def test_nothing_is_sent_where_every_rank_has_what_it_needs(a, src, b, dst):
    near, far = on(a, src), on(b, dst)
    assert total_sent(near, plan(near, far)) == 0


def alternatives(src: TensorSpec, dst: TensorSpec) -> Iterator[int]:
    """Bytes of all ways over one SBP on the source and one on the target."""
    for near in all_sbps(src.placement.ranks):
        for far in all_sbps(dst.placement.ranks):
            a, b = src.with_sbp(near), dst.with_sbp(far)
            moves = (*plan(src, a), exchange(a, b), *plan(b, dst))
            if not any(move.kind == "all_to_all" for move in moves):
                yield total_sent(src, moves)


@pytest.mark.parametrize("a", filter(has_one_axis, GRIDS), ids=str)
def test_no_way_over_other_sbps_sends_less(a):
    for b in filter(has_one_axis, others(a)):
        for src, dst in cases(a, b, [(8, 6)]):
            assert total_sent(src, plan(src, dst)) == min(alternatives(src, dst)), (src, dst)


def largest_held(src: TensorSpec, dst: TensorSpec) -> int:
    """The largest shard that a plan makes on the way."""
    sizes, state = [0], src
    for move in plan(src, dst)[:-1]:
        if isinstance(move, Exchange):
            state = move.dst
        else:
            state = state.with_sbp((*state.sbp[: move.axis], move.dst, *state.sbp[move.axis + 1 :]))
        sizes.append(torch.Size(state.local_shape(None)).numel())
    return max(sizes)


@from_each
def test_no_rank_holds_more_on_the_way_than_at_an_end(a):
    for b in others(a):
        for src, dst in cases(a, b, [(8, 8)]):
            ends = (src.local_shape(None), dst.local_shape(None))
            most = max(torch.Size(end).numel() for end in ends)
            assert largest_held(src, dst) <= most, (src, dst)


# -- values, gradients, bytes ----------------------------------------------------------------------


class OfMeta(torch.autograd.Function):
    """A result of the shape of meta tensors, where ranks outside follow: of the same op torch would
    need a millisecond to say so. With ``x`` alone it is the square."""

    @staticmethod
    def forward(ctx, x, *other):
        ctx.save_for_backward(x, *other)
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        return tuple(OfMeta.apply(x, *grads) for x in saved)


def square(local: torch.Tensor, spec: TensorSpec) -> tuple[torch.Tensor, TensorSpec]:
    """Elementwise square, which P does not pass through."""
    whole = spec.with_sbp(tuple(B if e.is_partial else e for e in spec.sbp))
    x = box(local, spec, whole)
    return OfMeta.apply(x) if x.is_meta else x**2, whole


def ones(local: torch.Tensor, spec: TensorSpec, rank: int) -> torch.Tensor:
    """The gradient of the sum of all elements, of which each rank adds up its own: 0 for one that
    another rank counts."""
    at = spec.placement.coordinate_of(rank)
    counts = at is None or all(c == 0 for c, e in zip(at, spec.sbp) if e.is_broadcast)
    return torch.full_like(local, float(counts))


def moved(rank: int, pairs: list) -> list[tuple]:
    """Value, gradient, gradient of the gradient's square, and what was sent, for each pair."""
    found = []
    for src, dst in pairs:
        full = whole_numbers(src.shape)
        x = shard_at(scatter(full, src), src, rank).requires_grad_()
        with counting() as log:
            y = box(x, src, dst)
        squared, where = square(y, dst)
        seed = ones(squared, where, rank)
        (grad,) = torch.autograd.grad(squared, x, seed, create_graph=True)
        again, there = square(grad, src.dual)
        (second,) = torch.autograd.grad(again, x, ones(again, there, rank))
        found.append((y.detach(), grad.detach(), second, [(c.name, c.bytes) for c in log.calls]))
    return found


def check(pairs: list, by_rank: list[list[tuple]]) -> None:
    for (src, dst), *results in zip(pairs, *by_rank):
        full = whole_numbers(src.shape)
        values, grads, seconds, calls = zip(*results)
        assert torch.equal(gather(in_grid_order(values, dst), dst), full), (src, dst)
        # y = x, summed squares: 2x; squared and summed again: 4x^2, whose gradient is 8x.
        assert torch.equal(gather(in_grid_order(grads, src.dual), src.dual), 2 * full), (src, dst)
        assert torch.equal(gather(in_grid_order(seconds, src.dual), src.dual), 8 * full), (src, dst)
        check_bytes(src, dst, calls)
        for spec, held in ((dst, values), (src, grads), (src, seconds)):
            for rank, x in enumerate(held):
                at = spec.placement.coordinate_of(rank)
                assert x.is_meta == (at is None) and tuple(x.shape) == spec.local_shape(at)


def check_bytes(src: TensorSpec, dst: TensorSpec, calls: tuple) -> None:
    """Each rank sends in the exchange what the plan says, and in each collective at most that."""
    moves = plan(src, dst)
    (middle,) = (move for move in moves if isinstance(move, Exchange))
    for rank, sent in enumerate(calls):
        assert sum(n for name, n in sent if name == "exchange") == middle.sent_by(rank), (src, dst)
    # A reduce-scatter is an all-to-all of the addends' pieces.
    names = {"reduce_scatter": "all_to_all"}
    for name, of_kind in itertools.groupby(moves, lambda move: names.get(move.kind, move.kind)):
        planned = [move.nbytes for move in of_kind if move.nbytes]
        sent = [[n for called, n in log if called == name] for log in calls]
        measured = [max(column) for column in zip(*[log for log in sent if log])]
        assert name == "exchange" or measured == planned, (src, dst, name)
    most = max(sum(n for _, n in sent) for sent in calls)
    assert most <= plan_bytes(moves)


def sample(pairs: list, seed: int) -> list:
    """All of them where asked for by the environment, else some."""
    count = 16 if ALL else 6
    if os.environ.get("EXHAUSTIVE") or len(pairs) <= count:
        return pairs
    picked = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:count]
    return [pairs[k] for k in picked.tolist()]


@from_each
def test_value_gradients_and_bytes_between_all_placements(a):
    pairs = []
    for b in others(a):
        pairs += sample(cases(a, b, [(8, 4), (7, 5)]), len(str((a, b))))
    check(pairs, simulate(moved, WORLD, pairs))


@st.composite
def moves_between(draw: st.DrawFn, partials: Sequence[Sbp] = (P,)) -> tuple[TensorSpec, TensorSpec]:
    """Two specs of one tensor on any two placements of some of four ranks; sizes from 0 on."""
    shape = draw(shapes())
    ends = []
    for _ in range(2):
        grid = draw(grids(WORLD))
        ranks = draw(st.permutations(range(WORLD)))[: math.prod(grid)]
        placement = Placement("cpu", torch.tensor(ranks).reshape(grid).tolist())
        sbp = draw(nd_sbps(placement.ndim, len(shape), partials))
        ends.append(TensorSpec.of(placement, sbp, shape, torch.float64))
    return ends[0], ends[1]


@settings(max_examples=150, deadline=None)
@given(moves_between())
def test_any_tensor_between_any_placements(pair):
    if pair[0].placement != pair[1].placement:
        check([pair], simulate(moved, WORLD, [pair]))


def test_between_gloo_ranks():
    pairs = [pair for a, b in PAIRS[::11] for pair in sample(cases(a, b, [SMALL]), 0)]
    check(pairs, pool(WORLD).run(moved, pairs))


# -- kinds of values, and ranks that follow --------------------------------------------------------


def run_from(rank: int, full: torch.Tensor, src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    return run(shard_at(scatter(full, src), src, rank), src, dst)


@settings(max_examples=150, deadline=None)
@given(moves_between((P, *EXTREMES)))
def test_any_kind_of_partial_between_any_placements(pair):
    src, dst = pair
    full = whole_numbers(src.shape)
    held = simulate(run_from, WORLD, full, src, dst)
    assert torch.equal(gather(in_grid_order(held, dst), dst), full)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("sbp", [B, S(0), P, P(max), P(min)], ids=str)
def test_every_dtype_travels(dtype, sbp):
    if not fits_dtype(sbp, dtype):
        return
    full = whole_numbers(SMALL, dtype)
    src, dst = on([0, 1, 2], sbp, dtype=dtype), on([3, 1], S(1), dtype=dtype)
    held = simulate(run_from, WORLD, full, src, dst)
    assert torch.equal(gather(in_grid_order(held, dst), dst), full)


def test_bool_is_not_summed_on_the_way():
    with pytest.raises(ValueError, match="torch.bool cannot be P, for truth values have no sum"):
        plan(on([0], B, dtype=torch.bool), on([1], P, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1)], ids=str)
def test_scalars_and_empty_tensors(shape):
    full = whole_numbers(shape)
    for sbp in (B, P):
        src, dst = on([0, 1], sbp, shape), on([1, 2, 3], B, shape)
        held = simulate(run_from, WORLD, full, src, dst)
        assert torch.equal(gather(in_grid_order(held, dst), dst), full)


def whole_everywhere(rank: int, full: torch.Tensor, src: TensorSpec) -> torch.Tensor:
    return run(shard_at(scatter(full, src), src, rank), src, whole_on_world(src))


@pytest.mark.parametrize("sbp", [B, S(0), P], ids=str)
def test_everywhere_is_every_rank_of_the_world(sbp):
    full = whole_numbers(SMALL)
    for x in simulate(whole_everywhere, WORLD, full, on([2, 0], sbp)):
        assert torch.equal(x, full)


def writes_through(rank: int, a, b) -> bool:
    src, dst = on(a, B), on(b, (B,) * np.ndim(b))
    x = shard_at(scatter(whole_numbers(SMALL), src), src, rank)
    y = run(x, src, dst)
    return not x.is_meta and not y.is_meta and y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("a", "b"), [([0, 1], [1, 0]), ([0], [0, 1]), ([0, 1], [[0, 1]])])
def test_the_result_never_shares_memory_with_the_input(a, b):
    assert not any(simulate(writes_through, 2, a, b))


def stray(rank: int) -> None:
    src = on([0, 1], S(0))
    dst = on([2, 3], S(0)) if rank else on([2, 3], S(1))
    with check_mode():
        run(shard_at(scatter(whole_numbers(SMALL), src), src, rank), src, dst)


def test_check_mode_names_a_rank_that_moves_elsewhere():
    with pytest.raises((RuntimeError, RankError), match=r"different boxings[\s\S]*S\(1\)"):
        simulate(stray, WORLD)
