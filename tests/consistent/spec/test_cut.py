"""Ways to cut a dim: what each rank holds, how they are written, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consistent.spec import B, Placement, S, Split, TensorSpec
from consistent.spec.cut import intersect_runs
from consistent.spec.sbp import dual, parse
from tests.reference import cut as shards_of
from tests.strategies import cuts

said: Any = S  # of any type
TWO = Placement("cpu", [0, 1])
GRID = Placement("cpu", [[0, 1], [2, 3]])
WRITTEN = [
    S(0, blocks=2),
    S(1, cut="zigzag"),
    S(0, sizes=(3, 0, 5)),
    S(-1, sizes=(3,)),
    S(0, of=4),
    S(0, of=(4, 2)),
    S(2, cut="zigzag", of=4),
    S(0, blocks=1, of=(2, 6)),
]


def held(entry: Split, n: int, parts: int) -> list[list[int]]:
    return [
        [i for start, size in entry.runs(n, parts, k) for i in range(start, start + size)]
        for k in range(parts)
    ]


@pytest.mark.parametrize(
    ("entry", "items"),
    [
        (S(0), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (S(0, blocks=1), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (S(0, blocks=3), [[0, 1, 2, 6, 7], [3, 4, 5]]),
        (S(0, cut="zigzag"), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (S(0, sizes=(3, 5)), [[0, 1, 2], [3, 4, 5, 6, 7]]),
        (S(0, sizes=(8, 0)), [[0, 1, 2, 3, 4, 5, 6, 7], []]),
        (S(0, of=4), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (S(0, of=(2, 6)), [[0, 2, 3, 4], [1, 5, 6, 7]]),
        (S(0, cut="zigzag", of=4), [[0, 3, 4, 7], [1, 2, 5, 6]]),
    ],
    ids=str,
)
def test_what_ranks_hold_of_8_items(entry, items):
    assert held(entry, 8, 2) == items


@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_each_item_lies_on_one_rank_in_ascending_runs(data, n, parts):
    entry = Split(0, data.draw(cuts(n, parts)))
    items = held(entry, n, parts)
    assert sorted(i for each in items for i in each) == list(range(n))
    assert all(each == sorted(each) for each in items)
    assert [entry.size(n, parts, k) for k in range(parts)] == [len(each) for each in items]
    runs = [entry.runs(n, parts, k) for k in range(parts)]
    assert all(a + size < b for each in runs for (a, size), (b, _) in zip(each, each[1:]))
    shards = shards_of(torch.arange(n), (entry,), (parts,), torch.Generator())
    assert [x.tolist() for x in shards] == items


@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_no_rank_is_left_out_where_a_layout_says_so(data, n, parts):
    entry = Split(0, data.draw(cuts(n, parts)))
    spec = TensorSpec.of(Placement("cpu", range(parts)), entry, (n,), torch.float32)
    short = n > 0 and any(entry.size(n, parts, k) == 0 for k in range(parts))
    assert spec.layout.has_empty_shards((n,)) == short


@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_what_two_cuts_share(data, n, parts):
    a, b = (Split(0, data.draw(cuts(n, parts))) for _ in "ab")
    runs = intersect_runs(a.runs(n, parts, 0), b.runs(n, parts, 0))
    both = set(held(a, n, parts)[0]) & set(held(b, n, parts)[0])
    assert [i for start, size in runs for i in range(start, start + size)] == sorted(both)


@pytest.mark.parametrize("entry", WRITTEN, ids=str)
def test_prints_as_typed_and_is_one_object(entry):
    assert parse(str(entry)) is entry
    assert parse(f"({entry}, B)") == (entry, B)
    assert eval(str(entry), {"S": S}) is entry
    assert pickle.loads(pickle.dumps(entry)) is entry
    assert copy.deepcopy(entry) is entry
    assert dual(entry) is entry


def test_words_of_texts():
    assert parse("S(0, cut='zigzag')") is S(0, cut="zigzag")
    assert parse("split(dim=1, blocks=2)") is S(1, blocks=2)
    assert S(0, of=[4, 2]) is S(0, of=(4, 2))


def test_specs_are_one_object_and_pickle():
    spec = TensorSpec.of(GRID, (S(0), S(0, cut="zigzag", of=2)), (8, 5), torch.float32)
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert spec.runs((1, 0)) == (((4, 1), (6, 1)), ((0, 5),))
    assert spec.local_shape((1, 0)) == (2, 5)
    assert spec.plain.sbp == (S(0), S(0))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: S(0, blocks=0), ValueError, "blocks holds 0"),
        (lambda: S(0, sizes=(3, -1)), ValueError, "sizes holds -1"),
        (lambda: said(0, sizes=(3, 1.5)), TypeError, "1.5 of type float"),
        (lambda: said(0, sizes=3), TypeError, "Give a tuple"),
        (lambda: S(0, blocks=2, cut="zigzag"), ValueError, "blocks= and cut= are given"),
        (lambda: S(0, cut="zag"), ValueError, "cut='zag' is not known"),
        (lambda: said("0", blocks=2), TypeError, "a dim is an int"),
    ],
)
def test_what_cannot_be_written(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("placement", "sbp", "words"),
    [
        (TWO, S(0, sizes=(3, 4)), "7 items together, and the dim has 9 items"),
        (TWO, S(0, sizes=(9,)), "there are 1 sizes, and the axis has 2 ranks"),
        (TWO, S(0, of=2), "no whole number of parts of 2"),
        (TWO, S(0, of=(4, 4)), "have 8 items together, and not 9"),
        (GRID, (S(0, cut="zigzag"), S(0)), "splits dim 0 further where it is cut"),
        (GRID, (S(0, blocks=1), S(0, blocks=1)), "splits dim 0 further"),
        (GRID, (S(0), S(0, sizes=(2, 2))), "4 items together, and the dim has 5 items"),
    ],
    ids=str,
)
def test_cuts_that_do_not_fit(placement, sbp, words):
    with pytest.raises(ValueError, match=words):
        TensorSpec.of(placement, sbp, (9, 4), torch.float32)


def test_a_cut_is_no_box():
    spec = TensorSpec.of(TWO, S(0, cut="zigzag"), (9, 4), torch.float32)
    with pytest.raises(ValueError, match="no one box on each rank"):
        spec.region((0,))
