from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.rules import DoesNotFit, Operand
from consistent.rules.layout.subscript import parse_subscript
from consistent.spec import B, Placement, TensorSpec
from tests.brute_force import check


def indices(*shape: int, dtype: torch.dtype = torch.int64) -> Operand:
    return Operand(1, TensorSpec.of(Placement("cpu", [0]), (B,), shape, dtype))


@st.composite
def basic_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple:
    """Ints, slices and None for leading dims, then perhaps ... and some for trailing ones."""
    count = draw(st.integers(0, len(shape)))
    trailing = draw(st.integers(0, count))
    entries: list[Any] = []
    for k in range(count):
        dim = k if k < count - trailing else len(shape) - count + k
        if k == count - trailing:
            entries.append(Ellipsis)
        if draw(st.integers(0, 4)) == 0:
            entries.append(None)
        n = shape[dim]
        bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
        step = st.sampled_from([None, 1, 2, 3])
        kinds = [st.just(slice(None)), st.builds(slice, bound, bound, step), st.integers(-n, n - 1)]
        entries.append(draw(st.one_of(kinds)))
    return tuple(entries)


CASES = st.sampled_from([(5, 4), (2, 7), (4, 3, 5)]).flatmap(
    lambda shape: st.tuples(st.just(shape), basic_indices(shape))
)
GRIDS = st.sampled_from([2, 3, 4, (2, 2)])


@given(CASES, GRIDS)
@settings(max_examples=60, deadline=None)
def test_reading_any_slice_is_right(case: tuple, grid: Any) -> None:
    shape, index = case
    check(torch.Tensor.__getitem__, torch.randn(shape, dtype=torch.float64), index, ranks=grid)


@given(CASES, GRIDS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_writing_any_slice_is_right(case: tuple, grid: Any, number: bool) -> None:
    shape, index = case
    x = torch.randn(shape, dtype=torch.float64)
    value = 2.5 if number else torch.randn_like(x[index])
    check(torch.Tensor.__setitem__, x, index, value, ranks=grid)


@pytest.mark.parametrize(
    ("index", "places", "block"),
    [
        ((slice(None), 1), {0: 0, 2: 1}, (0, ())),
        ((None, Ellipsis, slice(0, 2)), {0: 1, 1: 2, 2: 3}, (0, ())),
        ((slice(None), indices(6)), {0: 0, 2: 2}, (1, (6,))),
        ((indices(6), slice(None), indices(2, 1)), {1: 2}, (0, (2, 6))),
        ((slice(None), indices(6), indices(6)), {0: 0}, (1, (6,))),
        ((indices(6), None, indices(6)), {2: 2}, (0, (6,))),
        ((2, slice(None), indices(6)), {1: 0}, (1, (6,))),
        (([0, 1, 2],), {1: 1, 2: 2}, (0, (3,))),
    ],
)
def test_where_dims_go(index: tuple, places: dict, block: tuple) -> None:
    shape = (4, 5, 3)
    parsed = parse_subscript(index, shape)
    assert (parsed.out_dims, parsed.index_block) == (places, block)
    real = tuple(
        torch.zeros(e.shape, dtype=torch.int64) if isinstance(e, Operand) else e for e in index
    )
    out = torch.empty(shape)[real]
    assert {d: out.shape[p] for d, p in places.items()} == {
        item.dim: item.count if item.kind == "slice" else shape[item.dim]
        for item in parsed.of_kind("all", "slice")
    }


@pytest.mark.parametrize(
    "index",
    [
        True,
        indices(4, dtype=torch.bool),
        indices(),
        slice(torch.tensor(1), None),
        torch.ones(2).numpy(),
        1.0,
    ],
)
def test_what_only_the_whole_tensor_can_tell_is_refused(index: Any) -> None:
    with pytest.raises(DoesNotFit):
        parse_subscript(index, (4, 5))


def test_a_whole_slice_is_as_good_as_a_colon() -> None:
    assert [item.kind for item in parse_subscript((slice(0, 4), slice(-5, 9)), (4, 5)).items] == [
        "all",
        "all",
    ]


def test_part_of_a_slice_in_a_shard() -> None:
    # Items 1 3 5 7 9 of ten; a shard holds 4 5 6.
    (item,) = parse_subscript(slice(1, None, 2), (10,)).items
    assert item.slices_in_shard(4, 3) == (slice(1, 2, 2), slice(2, 3))
