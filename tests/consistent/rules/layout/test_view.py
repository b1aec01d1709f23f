from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.rules import Call, DoesNotFit, Operand, Out, find_row
from consistent.rules.layout.view import dim_groups, piece_starts
from consistent.spec import B, NdSbp, Placement, S, Split, TensorSpec, piece
from tests.brute_force import check

Shape = tuple[int, ...]


def view_call(source: Shape, target: Shape, sbp: NdSbp, grid: Shape) -> Call:
    ranks = torch.arange(math.prod(grid)).view(grid).numpy()
    spec = TensorSpec.of(Placement("cpu", ranks), sbp, source, torch.float32)
    x = Operand(0, spec)
    return Call("view", (x, target), {}, (x,), (Out(torch.Size(target), torch.float32),))


def claimed(source: Shape, target: Shape, sbp: NdSbp, grid: Shape, axis: int = 0) -> set:
    """Pairs (dim, place) that may be split on ``axis`` with nothing moved."""
    call = view_call(source, target, sbp, grid)
    call.axis = axis
    row = find_row("view")
    assert row is not None
    found = [s for s in row.signatures(call, grid[axis]) if s.form is None]
    pairs = [(s.ins[0], s.outs[0]) for s in found]
    return {(a.dim, b.dim) for a, b in pairs if isinstance(a, Split) and isinstance(b, Split)}


@st.composite
def two_shapes(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 3, 4, 5)) -> tuple[Shape, Shape]:
    """Two shapes of the same number of elements, made by joining the same factors."""
    factors = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=4))

    def joined() -> Shape:
        ends = draw(st.lists(st.integers(1, len(factors)), max_size=3).map(sorted))
        edges = [0, *ends, len(factors)]
        return tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(edges))

    return joined(), joined()


@given(two_shapes(), st.sampled_from([2, 3, 4, (2, 2), (2, 3)]))
@settings(max_examples=60, deadline=None)
def test_views_between_any_factorizations_are_right(
    shapes: tuple[Shape, Shape], grid: int | Shape
) -> None:
    source, target = shapes
    check(torch.Tensor.reshape, torch.randn(source, dtype=torch.float64), target, ranks=grid)


@given(two_shapes(sizes=(2, 3, 4, 5)), st.sampled_from([2, 3, 4]))
@settings(max_examples=60, deadline=None)
def test_a_view_claims_every_split_that_holds(shapes: tuple[Shape, Shape], parts: int) -> None:
    source, target = (tuple(n for n in shape if n != 1) or (1,) for shape in shapes)
    x = torch.arange(math.prod(source))

    def pieces(shape: Shape, dim: int) -> list[list[int]]:
        y = x.view(shape)
        return [
            y.narrow(dim, *piece(shape[dim], parts, k)).flatten().tolist() for k in range(parts)
        ]

    held = {
        (i, o)
        for i, o in itertools.product(range(len(source)), range(len(target)))
        if pieces(source, i) == pieces(target, o)
    }
    assert claimed(source, target, (B,), (parts,)) == held


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((6, 4), (24,), [((0, 1), (0,))]),
        ((2, 3, 4), (6, 2, 2), [((0, 1), (0,)), ((2,), (1, 2))]),
        ((1, 6), (6, 1), [((0, 1), (0,))]),
        ((5, 1, 4), (5, 1, 4), [((0,), (0,)), ((1,), (1,)), ((2,), (2,))]),
        ((4, 0), (4, 2, 0), [((0,), (0,))]),
    ],
)
def test_groups(source: Shape, target: Shape, expected: list) -> None:
    assert [(tuple(a), tuple(b)) for a, b in dim_groups(source, target)] == expected


def test_axes_that_split_one_dim_cut_each_others_pieces() -> None:
    assert piece_starts(5, [2, 2]) == [0, 2, 3, 4]


def test_an_axis_that_splits_the_dim_keeps_it_and_another_may_not_join() -> None:
    # batch * sequence -> batch, sequence: 2 pieces of the batch fit, 4 do not.
    source, target, grid = (6, 8), (2, 3, 8), (2, 2)
    assert claimed(source, target, (S(0), B), grid, axis=0) == {(0, 0), (1, 2)}
    assert claimed(source, target, (S(0), B), grid, axis=1) == {(1, 2)}
    assert claimed(source, target, (B, S(0)), grid, axis=0) == {(1, 2)}
    assert claimed(source, target, (B, S(0)), grid, axis=1) == {(0, 0), (1, 2)}


def test_a_view_of_another_dtype_is_not_claimed() -> None:
    call = view_call((4, 4), (4, 4), (B,), (2,))
    call.outs = (Out(torch.Size((4, 4)), torch.int32),)
    with pytest.raises(DoesNotFit, match="another dtype"):
        find_row("view").signatures(call, 2)  # type: ignore[union-attr]
