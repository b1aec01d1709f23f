"""Plans are lists of moves; arithmetic only."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

from consistent.boxing.plan import (
    boxing_bytes,
    boxing_seconds,
    plan,
    plan_bytes,
    plan_seconds,
)
from consistent.boxing.steps import Exchange, Move, plan_text
from consistent.spec import B, P, Placement, S, TensorSpec
from tests.strategies import spec_pairs

THREE = Placement("cpu", [0, 1, 2])
GRID = Placement("cpu", [[0, 1], [2, 3]])
NAMED = Placement("cpu", [[0, 1], [2, 3]], ["dp", "tp"])
SMALL, LARGE = (7, 5), (7000, 5000)


def spec(sbp, shape=SMALL, placement=None, dtype=torch.float32) -> TensorSpec:
    if placement is None:
        placement = GRID if isinstance(sbp, tuple) else THREE
    return TensorSpec.of(placement, sbp, shape, dtype)


def planned(src, dst, shape=SMALL, placement=None) -> str:
    a = spec(src, shape, placement)
    return plan_text(a.sbp, plan(a, spec(dst, shape, placement)))


def test_nothing_to_do_is_an_empty_plan():
    assert plan(spec(S(0)), spec(S(0))) == ()


@pytest.mark.parametrize(
    ("src", "dst", "moves"),
    [
        (S(0), B, [Move(0, S(0), B, "all_gather", 120)]),  # 3 rows of 20 bytes to 2 others
        (P, B, [Move(0, P, B, "all_reduce", 187)]),  # ceil(2 * 2 / 3 * 140)
        (B, S(1), [Move(0, B, S(1), "slice", 0)]),
        (B, P, [Move(0, B, P, "keep_first", 0)]),
        (S(0), S(1), [Move(0, S(0), S(1), "all_to_all", 36)]),  # 3 rows of 3 columns
        (P, S(0), [Move(0, P, S(0), "reduce_scatter", 100)]),  # 5 rows of 20 bytes
        (S(1), P, [Move(0, S(1), P, "pad", 0)]),
    ],
)
def test_one_axis_takes_one_move(src, dst, moves):
    assert list(plan(spec(src), spec(dst))) == moves


@pytest.mark.parametrize(
    ("src", "dst", "line"),
    [
        # By single axes the inner split of dim 0 would have to make way for the outer one.
        (
            (S(0), S(0)), (B, S(0)),
            "(S(0), S(0)) -exchange([0, 1], [2, 3] to [0, 1], [2, 3])-> (B, S(0))",
        ),
        # Gathering the two would send as much in one exchange, and no less.
        (
            (S(0), S(1)), (B, B),
            "(S(0), S(1)) -all_gather(1)-> (S(0), B) -all_gather(0)-> (B, B)",
        ),
        # Reduced while it is still small.
        ((S(0), P), (B, B), "(S(0), P) -all_reduce(1)-> (S(0), B) -all_gather(0)-> (B, B)"),
        ((B, B), (S(0), S(0)), "(B, B) -slice(0)-> (S(0), B) -slice(1)-> (S(0), S(0))"),
        ((P, P), (B, B), "(P, P) -all_reduce(0)-> (B, P) -all_reduce(1)-> (B, B)"),
        # Sliced first: what is sent has shrunk.
        ((S(0), B), (B, S(1)), "(S(0), B) -slice(1)-> (S(0), S(1)) -all_gather(0)-> (B, S(1))"),
        ((P, B), (B, S(0)), "(P, B) -slice(1)-> (P, S(0)) -all_reduce(0)-> (B, S(0))"),
        # Extremes move as sums do; what is whole is its own largest.
        ((P(max), P(max)), (S(0), P(max)), "(P(max), P(max)) -reduce_scatter(0)-> (S(0), P(max))"),
        ((B, S(0)), (P(max), S(0)), "(B, S(0)) -keep(0)-> (P(max), S(0))"),
        # From one kind to another by S or B, and no state is of two kinds.
        (
            (P(max), B), (P(min), B),
            "(P(max), B) -reduce_scatter(0)-> (S(0), B) -pad(0)-> (P(min), B)",
        ),
        ((P, B), (B, P(max)), "(P, B) -all_reduce(0)-> (B, B) -keep(1)-> (B, P(max))"),
    ],
)  # fmt: skip
def test_two_axes_small(src, dst, line):
    assert planned(src, dst) == line


@pytest.mark.parametrize(
    ("src", "dst", "line"),
    [
        # Each rank gets what it lacks, once; by single axes it would be sent twice.
        (
            (S(0), S(1)), (S(1), S(0)),
            "(S(0), S(1)) -exchange([0, 1], [2, 3] to [0, 1], [2, 3])-> (S(1), S(0))",
        ),
        # An all-reduce over two axes scatters first: the second axis then reduces a part.
        (
            (P, P), (B, B),
            "(P, P) -reduce_scatter(0)-> (S(0), P) -all_reduce(1)-> (S(0), B) "
            "-all_gather(0)-> (B, B)",
        ),
    ],
)  # fmt: skip
def test_two_axes_large(src, dst, line):
    assert planned(src, dst, LARGE) == line


def test_a_permutation_of_splits_sends_each_element_once():
    src, dst = (spec(sbp, LARGE) for sbp in ((S(0), S(1)), (S(1), S(0))))
    (move,) = plan(src, dst)
    # Of a quarter of the tensor each rank keeps what it holds of its new quarter.
    assert isinstance(move, Exchange)
    held, wanted = src.nbytes // 4, dst.nbytes // 4
    assert move.nbytes <= min(held, wanted)


def test_plan_shows_names_of_axes():
    assert planned((S(0), P), (S(0), B), placement=NAMED) == "(S(0), P) -all_reduce(tp)-> (S(0), B)"


def moves_only(src, dst) -> list[Move]:
    return [move for move in plan(src, dst) if isinstance(move, Move)]


def ends_at_its_target(src, dst) -> None:
    state = list(src.sbp)
    moves = plan(src, dst)
    if any(isinstance(move, Exchange) for move in moves):
        (only,) = moves
        assert (only.src, only.dst) == (src, dst)
        return
    for move in moves:
        assert state[move.axis] is move.src is not move.dst
        state[move.axis] = move.dst
    assert tuple(state) == dst.sbp


def changes_splits_only_on_the_innermost_axis_of_their_dim(src, dst) -> None:
    state = list(src.sbp)
    for move in moves_only(src, dst):
        for entry in (move.src, move.dst):
            assert not (entry.is_split and entry in state[move.axis + 1 :])
        state[move.axis] = move.dst


def makes_an_axis_partial_only_to_stay_so(src, dst) -> None:
    for move in moves_only(src, dst):
        assert move.dst is not P or dst.sbp[move.axis] is P


def sends_nothing_from_broadcast(src, dst) -> None:
    whole = src.with_sbp((B,) * src.placement.ndim)
    assert plan_bytes(plan(whole, dst)) == 0


@settings(max_examples=300, deadline=None)
@given(spec_pairs(max_ranks=8))
def test_any_plan(pair):
    ends_at_its_target(*pair)
    changes_splits_only_on_the_innermost_axis_of_their_dim(*pair)
    makes_an_axis_partial_only_to_stay_so(*pair)
    sends_nothing_from_broadcast(*pair)


def test_a_plan_costs_what_its_moves_cost():
    src, dst = spec((S(0), P)), spec((B, B))
    moves = plan(src, dst)
    assert boxing_bytes(src, dst) == plan_bytes(moves) == sum(m.nbytes for m in moves) > 0
    assert boxing_seconds(src, dst) == plan_seconds(moves) == sum(m.seconds for m in moves) > 0


def test_latency_counts_for_small_tensors_and_bytes_for_large():
    small = boxing_seconds(spec(S(0)), spec(B))
    large = boxing_seconds(spec(S(0), LARGE), spec(B, LARGE))
    assert 30e-6 < small < 35e-6
    assert large > 60e-3


def test_a_plan_is_made_once():
    assert plan(spec((S(0), P)), spec((B, B))) is plan(spec((S(0), P)), spec((B, B)))


def test_every_pair_of_three_axes_has_a_plan():
    placement = Placement("cpu", [[[0, 1], [2, 3]]])
    entries = list(itertools.product((B, P, S(0), S(1)), repeat=3))
    for src, dst in itertools.islice(itertools.product(entries, entries), 0, None, 37):
        a, b = spec(src, placement=placement), spec(dst, placement=placement)
        assert (plan(a, b) == ()) == (src == dst)


def test_65536_ranks_are_planned_like_two():
    many = Placement("cpu", range(65536))
    src, dst = (spec(entry, (1 << 20,), many) for entry in (S(0), B))
    assert plan(src, dst) == (Move(0, S(0), B, "all_gather", 65535 * 64),)


def test_other_shape_is_an_error():
    with pytest.raises(ValueError, match=r"differ in shape[\s\S]*\[7, 5\][\s\S]*\[7, 6\]"):
        plan(spec(S(0)), spec(S(0), (7, 6)))


def test_other_dtype_is_an_error():
    with pytest.raises(ValueError, match=r"differ in dtype[\s\S]*f32[\s\S]*f64"):
        plan(spec(S(0)), spec(S(0), dtype=torch.float64))


@pytest.mark.parametrize(("src", "dst"), [(B, P), (P, B), (S(0), P), (P, S(0))], ids=str)
def test_bool_cannot_be_a_sum(src, dst):
    with pytest.raises(ValueError, match="torch.bool cannot be P, for truth values have no sum"):
        plan(spec(src, dtype=torch.bool), spec(dst, dtype=torch.bool))
