"""The moves as data."""

from __future__ import annotations

import pytest

from consistent.boxing.steps import KINDS, Move, kind_of, plan_text
from consistent.spec import EXTREMES, B, P, S, dual

TRANSPOSES = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "slice": "pad",
    "pad": "slice",
    "keep_first": "keep_first",
    "all_to_all": "all_to_all",
}
PAIRS = [(a, b) for a in (B, P, S(0), S(1)) for b in (B, P, S(0), S(1)) if a is not b]


def test_move_prints_as_an_arrow():
    assert str(Move(0, S(0), B, "all_gather", 24)) == "S(0) -all_gather(0)-> B"


def test_move_prints_the_name_of_its_axis():
    assert str(Move(1, P, B, "all_reduce", 24, label="tp")) == "P -all_reduce(tp)-> B"


def test_moves_are_equal_whatever_their_label_and_results():
    assert Move(1, P, B, "all_reduce", 24, "tp", 8) == Move(1, P, B, "all_reduce", 24)


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
def test_transpose_of_a_move_is_the_move_between_duals(src, dst):
    assert kind_of(dual(dst), dual(src)) == TRANSPOSES[kind_of(src, dst)]


def test_the_pairs_use_every_kind():
    assert {kind_of(*pair) for pair in [*PAIRS, (B, P(max))]} == set(KINDS)


@pytest.mark.parametrize("kind", EXTREMES, ids=str)
def test_extremes_move_as_sums_do_but_b_is_kept_by_all(kind):
    assert kind_of(B, kind) == "keep"
    for other in (S(0), B):
        assert kind_of(kind, other) == kind_of(P, other)
    assert kind_of(S(0), kind) == kind_of(S(0), P)


def test_plan_shows_the_state_between_moves():
    moves = [Move(1, P, B, "all_reduce", 8), Move(0, S(0), B, "all_gather", 8)]
    assert (
        plan_text((S(0), P), moves)
        == "(S(0), P) -all_reduce(1)-> (S(0), B) -all_gather(0)-> (B, B)"
    )
