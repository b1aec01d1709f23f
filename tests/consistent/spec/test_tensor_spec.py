"""Specs: what each rank holds of a tensor."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consistent.spec import B, P, Placement, S, TensorSpec, piece, resolve_sbp
from tests.reference import gather, scatter, whole_numbers
from tests.strategies import specs

GRID = Placement("cpu", [[0, 1], [2, 3]])


def of(sbp, shape=(8, 16), ranks=(0, 1, 2), dtype=torch.float32) -> TensorSpec:
    return TensorSpec.of(Placement("cpu", ranks), sbp, shape, dtype)


# -- pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "parts", "pieces"),
    [
        (7, 3, [(0, 3), (3, 2), (5, 2)]),
        (6, 3, [(0, 2), (2, 2), (4, 2)]),
        (2, 3, [(0, 1), (1, 1), (2, 0)]),
        (0, 3, [(0, 0), (0, 0), (0, 0)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_pieces_are_balanced_and_the_first_are_larger(n, parts, pieces):
    assert [piece(n, parts, k) for k in range(parts)] == pieces


@given(st.integers(0, 1000), st.integers(1, 50))
def test_pieces_lie_side_by_side_and_differ_by_one_at_most(n, parts):
    pieces = [piece(n, parts, k) for k in range(parts)]
    ends = [start + size for start, size in pieces]
    assert [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == n
    sizes = [size for _, size in pieces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(specs(max_ranks=8))
def test_scatter_then_gather_is_the_identity(spec):
    full = whole_numbers(spec.shape)
    assert torch.equal(gather(scatter(full, spec), spec), full)


@given(specs(max_ranks=8))
def test_local_shapes_are_those_of_scattered_shards(spec):
    coordinates = itertools.product(*map(range, spec.placement.shape))
    for at, shard in zip(coordinates, scatter(whole_numbers(spec.shape), spec), strict=True):
        assert spec.local_shape(at) == tuple(shard.shape)


@given(specs(max_ranks=8, partials=()))
def test_boxes_are_where_the_shards_come_from(spec):
    full = whole_numbers(spec.shape)
    coordinates = itertools.product(*map(range, spec.placement.shape))
    for at, shard in zip(coordinates, scatter(full, spec), strict=True):
        index = tuple(slice(a, a + n) for a, n in zip(*spec.region(at), strict=True))
        assert torch.equal(full[index], shard)


def test_two_axes_split_one_dim_outer_first():
    spec = TensorSpec.of(GRID, (S(0), S(0)), (7,), torch.float32)
    boxes = [spec.region(at) for at in itertools.product((0, 1), (0, 1))]
    assert boxes == [((0,), (2,)), ((2,), (2,)), ((4,), (2,)), ((6,), (1,))]


@given(specs())
def test_outside_the_shape_is_that_of_the_origin(spec):
    assert spec.local_shape(None) == spec.local_shape((0,) * spec.placement.ndim)


# -- as a value ------------------------------------------------------------------------------------


@given(specs())
def test_equal_specs_are_one_object(spec):
    again = TensorSpec.of(
        Placement("cpu", spec.placement.ranks.tolist()), spec.sbp, tuple(spec.shape), spec.dtype
    )
    assert again is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert copy.copy(spec) is copy.deepcopy(spec) is spec


def test_unused_specs_are_forgotten():
    from consistent.spec.tensor_spec import _interned

    for n in range(100):
        of(S(0), (12345, n))
    gc.collect()
    assert not [key for key in _interned if key[1][:1] == (12345,)]


@pytest.mark.parametrize(
    ("spec", "printed"),
    [
        (of(S(0)), 'f32[8, 16] S(0) on placement("cpu", ranks=[0, 1, 2])'),
        (of(P, (), dtype=torch.bool), 'bool[] P on placement("cpu", ranks=[0, 1, 2])'),
        (
            TensorSpec.of(GRID, (S(1), B), (2, 3), torch.bfloat16),
            'bf16[2, 3] (S(1), B) on placement("cpu", ranks=[[0, 1], [2, 3]])',
        ),
        (
            of(B, (1,), dtype=torch.float8_e5m2),
            'float8_e5m2[1] B on placement("cpu", ranks=[0, 1, 2])',
        ),
    ],
    ids=str,
)
def test_prints_shape_sbp_and_placement(spec, printed):
    assert repr(spec) == printed


def test_variations_keep_the_rest():
    spec = of(S(0))
    assert spec.with_sbp((B,)) is of(B)
    assert spec.with_dtype(torch.int64) is of(S(0), dtype=torch.int64)
    assert spec.with_sbp(spec.sbp) is spec.with_dtype(spec.dtype) is spec


@given(specs(partials=(P,)))
def test_dual_of_the_dual_is_the_spec(spec):
    assert spec.dual.dual is spec
    assert spec.dual.shape == spec.shape and spec.dual.dtype == spec.dtype


def test_axes_are_partial_in_one_way():
    with pytest.raises(ValueError, match=r"\(P\(max\), P\) is partial in two ways"):
        TensorSpec.of(GRID, (P(max), P), (6,), torch.float32)


def test_sizes():
    spec = of(S(0))
    assert (spec.ndim, spec.numel, spec.nbytes) == (2, 128, 512)


def test_a_spec_over_65536_ranks_is_as_small_as_over_two():
    few, many = of(S(0), ranks=range(2)), of(S(0), ranks=range(65536))
    for spec in (few, many):
        spec.local_shape((1,))
    assert many.local_shape((7,)) == (1, 16) and many.local_shape((65535,)) == (0, 16)
    assert sys.getsizeof(many) == sys.getsizeof(few)
    assert len(many._regions) == 3


# -- bad input -------------------------------------------------------------------------------------


def test_negative_dims_count_from_the_end():
    assert of(S(-1)) is of(S(1))
    assert of("S(-2)") is of(S(0))


@pytest.mark.parametrize("dim", [2, -3, 7])
def test_split_out_of_range_is_an_error(dim):
    with pytest.raises(
        ValueError, match=rf"splits dim {dim} of a tensor of shape \(8, 16\), .* dims -2 to 1"
    ):
        of(S(dim))


def test_tensor_without_dims_cannot_be_split():
    with pytest.raises(ValueError, match="no dim to split"):
        of(S(0), ())


@pytest.mark.parametrize("sbp", [S(0), (S(0),), (S(0), B, B), ()], ids=str)
def test_wrong_number_of_sbps_is_an_error_with_both_numbers(sbp):
    count = 1 if sbp is S(0) else len(sbp)
    with pytest.raises(ValueError, match=rf"has {count} entries, and .* has 2 axes \(2, 2\)"):
        TensorSpec.of(GRID, sbp, (8, 16), torch.float32)


@pytest.mark.parametrize("sbp", [True, None, torch.float32], ids=str)
def test_what_is_no_sbp_is_an_error(sbp):
    with pytest.raises(TypeError, match="is not an SBP"):
        of(sbp)


def test_negative_size_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(8, -1\) has a negative size"):
        of(S(0), (8, -1))


def test_resolving_keeps_what_is_resolved():
    assert resolve_sbp((S(0), P), GRID, (3,)) == (S(0), P)


@pytest.mark.parametrize(
    ("sbp", "items"),
    [
        ((S(0), B), 4), ((S(0), S(0)), 2), ((S(0, sizes=(1, 7)), B), 7),
        ((B, S(0, sizes=(0, 8))), 8), ((S(1, sizes=(13, 3)), S(0)), 13 * 4 / 16),
    ],
    ids=str,
)  # fmt: skip
def test_the_largest_shard_is_that_of_any_rank(sbp, items):
    spec = TensorSpec.of(GRID, sbp, (8, 16), torch.float32)
    assert spec.largest_nbytes == items * 16 * 4
