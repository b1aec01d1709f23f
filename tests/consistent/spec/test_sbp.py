"""SBPs: values that print as they are typed."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from consistent.spec import (
    EXTREMES,
    B,
    P,
    S,
    as_nd_sbp,
    as_sbp,
    dual,
    dual_nd,
    fits_dtype,
    has_one_partial_kind,
    partial_of,
)
from consistent.spec.sbp import broadcast, parse, partial_max, partial_min, partial_sum, split
from tests.strategies import any_sbps

entries = any_sbps()
tuples = st.lists(entries, max_size=4).map(tuple)


@given(entries)
def test_parsing_what_was_printed_gives_the_same_object(entry):
    assert parse(str(entry)) is entry


@given(tuples)
def test_parsing_a_printed_tuple_gives_it_back(nd_sbp):
    assert parse(str(nd_sbp)) == nd_sbp


@given(entries)
def test_printing_is_typing(entry):
    assert eval(repr(entry), {"S": S, "B": B, "P": P, "max": max, "min": min}) is entry


@given(entries)
def test_values_are_interned(entry):
    assert pickle.loads(pickle.dumps(entry)) is entry
    assert copy.copy(entry) is copy.deepcopy(entry) is entry


def test_long_names_and_calls_are_the_short_ones():
    assert split(1) is S(1) is split(dim=1)
    assert broadcast is B is broadcast()
    assert partial_sum is P is partial_sum() is P("sum") is P(sum)
    assert partial_max is P(max) is P("max") is partial_max()
    assert partial_min is P(min) is P("min") is partial_min()


@pytest.mark.parametrize("op", ["mean", 0, len], ids=repr)
def test_partial_knows_three_ways(op):
    with pytest.raises(ValueError, match="P knows sum, max and min"):
        P(op)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("S(0)", S(0)),
        (" split( dim = -1 ) ", S(-1)),
        ("broadcast", B),
        ("partial_sum", P),
        ("partial_max", P(max)),
        (" P( min ) ", P(min)),
        ("(P(max), S(0))", (P(max), S(0))),
        ("(S(0), B)", (S(0), B)),
        ("S(0), B", (S(0), B)),
        ("(P,)", (P,)),
        ("(B)", (B,)),
        ("()", ()),
    ],
)
def test_texts_that_parse(text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "caret"),
    [
        ("", 0),
        ("X", 0),
        ("S", 0),
        ("S(x)", 0),
        ("S(0) B", 5),
        ("(S(0), Q)", 6),
        ("P(mean)", 1),
        ("(B", 2),
        ("(B, P) B", 7),
        ("(,B)", 1),
        ("B)", 1),
    ],
)
def test_fault_has_a_caret_under_it(text, caret):
    with pytest.raises(ValueError, match="cannot read this text as an SBP") as error:
        parse(text)
    _, shown, pointer, *_ = str(error.value).split("\n")
    assert shown == f"  {text}"
    assert pointer == " " * (caret + 2) + "^"


@given(tuples)
def test_dual_twice_is_the_same(nd_sbp):
    assume(not any(entry.is_extreme for entry in nd_sbp))
    assert dual_nd(dual_nd(nd_sbp)) == nd_sbp


@pytest.mark.parametrize("entry", EXTREMES, ids=str)
def test_extremes_have_no_dual(entry):
    with pytest.raises(ValueError, match="it has no gradient"):
        dual(entry)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("s(0)", "S(0)"),
        ("S1", "S(1)"),
        ("Shard(dim=1)", "S(1)"),
        ("split(axis=-1)", "S(-1)"),
        ("(S(0), Shard(2))", "S(2)"),
        ("S", "S(0)"),
        ("0", "S(0)"),
        ("replicate", "B"),
        ("brodcast", "B"),
        ("Partial()", "P"),
        ("partial(max)", "P(max)"),
        ("P(mean)", None),
        ("zero3", None),
        ("S(0) B", None),
    ],
)
def test_the_nearest_right_text_is_suggested(text, near):
    with pytest.raises(ValueError, match="cannot read this text as an SBP") as error:
        parse(text)
    suggested = re.findall(r"Did you mean '(.*?)'\?", str(error.value))
    assert suggested == ([near] if near else [])


def test_placements_of_dtensor_are_told_their_names_here():
    for theirs, here in ((Shard(1), "S(1)"), (Replicate(), "B"), (Partial(), "P")):
        with pytest.raises(TypeError, match=re.escape(f"It is called {here} here.")):
            as_nd_sbp([theirs])


def test_dual_swaps_broadcast_and_partial():
    assert (dual(B), dual(P), dual(S(3))) == (P, B, S(3))


ONE_AXIS = [S(0), "S(0)", (S(0),), [S(0)], ["S(0)"], "(S(0),)", 0, [0]]


@pytest.mark.parametrize("value", ONE_AXIS, ids=repr)
def test_one_axis_in_any_form(value):
    assert as_nd_sbp(value) == (S(0),) and as_sbp(value) is S(0)


def test_several_axes_in_any_form():
    assert as_nd_sbp((0, "B")) == as_nd_sbp("(S(0), B)") == (S(0), B)
    assert as_nd_sbp([-1, P]) == (S(-1), P)
    with pytest.raises(TypeError, match="has 2 entries, where one axis is asked for"):
        as_sbp((0, 1))


@pytest.mark.parametrize("value", [None, True, 1.0, {"S": 0}, [None], ((B, B),)], ids=repr)
def test_what_is_no_sbp_is_a_type_error(value):
    with pytest.raises(TypeError, match="is not an SBP"):
        as_nd_sbp(value)


@pytest.mark.parametrize("dim", ["0", 1.0, None, True], ids=repr)
def test_split_takes_an_int(dim):
    with pytest.raises(TypeError, match="a dim is an int"):
        S(dim)


def test_a_split_cannot_be_changed():
    with pytest.raises(AttributeError, match=r"write S\(new_dim\)"):
        S(0).dim = 1
    assert S(0).dim == 0


def test_extremes_are_partial_in_one_way_each():
    assert [e.is_extreme for e in (S(0), B, P, P(max), P(min))] == [False] * 3 + [True] * 2
    assert has_one_partial_kind((P(max), B, P(max))) and not has_one_partial_kind((P(max), P))
    assert (partial_of((B, S(0))), partial_of((B, P(min)))) == (None, P(min))


def test_truth_values_have_an_order_and_complex_numbers_a_sum():
    assert [fits_dtype(e, torch.bool) for e in (P, P(max), B)] == [False, True, True]
    assert [fits_dtype(e, torch.complex64) for e in (P, P(max), B)] == [True, False, True]


def test_kinds():
    assert [(e.is_split, e.is_broadcast, e.is_partial) for e in (S(0), B, P)] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
