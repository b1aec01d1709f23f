"""Placements: which ranks, in what grid."""

from __future__ import annotations

import copy
import pickle
import re
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given

from consistent.spec import Placement, S, check_placement
from tests.ranks import pool
from tests.strategies import rank_grids


@given(rank_grids())
def test_grid_is_kept_as_given(grid):
    assert Placement("cpu", grid).ranks.tolist() == grid


@given(rank_grids())
def test_rank_and_coordinate_are_inverse(grid):
    placement, array = Placement("cpu", grid), np.array(grid)
    for at in np.ndindex(array.shape):
        assert placement.rank_at(at) == array[at]
        assert placement.coordinate_of(int(array[at])) == at
    for rank in set(range(-2, array.max() + 3)) - set(array.ravel().tolist()):
        assert placement.coordinate_of(rank) is None


@given(rank_grids())
def test_axis_ranks_are_a_line_of_the_grid(grid):
    placement, array = Placement("cpu", grid), np.array(grid)
    for at in np.ndindex(array.shape):
        for axis in range(array.ndim):
            line = tuple(slice(None) if a == axis else c for a, c in enumerate(at))
            assert placement.axis_ranks(axis, at) == tuple(array[line].tolist())


@given(rank_grids())
def test_parsing_what_was_printed_gives_it_back(grid):
    placement = Placement("cpu", grid)
    assert eval(repr(placement), {"placement": Placement}) == placement


@given(rank_grids())
def test_pickling_and_copying_keep_it(grid):
    placement = Placement("cpu", grid)
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert copy.copy(placement) is copy.deepcopy(placement) is placement


@pytest.mark.parametrize(
    ("ranks", "printed"),
    [
        (3, "[3]"),
        (range(4), "[0, 1, 2, 3]"),
        (range(16), "range(16)"),
        (range(4, 16), "range(4, 16)"),
        (range(40, 0, -4), "range(40, 0, -4)"),
        ([[0, 1], [2, 3]], "[[0, 1], [2, 3]]"),
    ],
    ids=str,
)
def test_prints_as_it_is_typed(ranks, printed):
    assert repr(Placement("cpu", ranks)) == f'placement("cpu", ranks={printed})'


def test_prints_names_of_axes():
    placement = Placement("cpu", [[0, 1], [2, 3]], axes=["dp", "tp"])
    printed = "placement(\"cpu\", ranks=[[0, 1], [2, 3]], axes=('dp', 'tp'))"
    assert repr(placement) == printed
    assert eval(printed, {"placement": Placement}) == placement


def test_large_regular_grid_prints_short():
    grid = np.arange(65536).reshape(256, 256)
    placement = Placement("cpu", grid)
    printed = 'placement("cpu", ranks=np.arange(65536).reshape(256, 256))'
    assert repr(placement) == printed
    assert eval(printed, {"placement": Placement, "np": np}) == placement
    shifted = Placement("cpu", grid + 7)
    assert eval(repr(shifted), {"placement": Placement, "np": np}) == shifted


@pytest.mark.parametrize(
    "ranks", [[0, 1, 2, 3], (0, 1, 2, 3), range(4), np.arange(4), torch.arange(4)], ids=type
)
def test_same_grid_in_any_form_is_the_same_placement(ranks):
    one, other = Placement("cpu", ranks), Placement("cpu", range(4))
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [([1, 0, 2, 3], None), (range(3), None), ([[0, 1], [2, 3]], None), (range(4), ["dp"])],
    ids=str,
)
def test_grid_order_and_names_tell_placements_apart(ranks, axes):
    assert Placement("cpu", range(4)) != Placement("cpu", ranks, axes)


def test_a_placement_is_no_other_value():
    assert Placement("cpu", [0]) != [0]


def test_order_of_ranks_is_kept():
    placement = Placement("cpu", [2, 0, 1])
    assert placement.ranks.tolist() == [2, 0, 1]
    assert [placement.coordinate_of(rank) for rank in range(4)] == [(1,), (2,), (0,), None]
    assert placement.first_rank == 2


def test_shape_size_and_axes():
    placement = Placement("cpu", [[0, 1, 2], [3, 4, 5]], axes=["dp", "tp"])
    assert (placement.shape, placement.size, placement.ndim) == ((2, 3), 6, 2)
    assert placement.axes == ("dp", "tp")


def test_without_processes_all_is_this_one():
    assert Placement.all("cpu") == Placement("cpu", [0])


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 1, 0], "rank 0 stands twice"),
        ([[0, 1], [1, 2]], "rank 1 stands twice"),  # regular, with strides that meet
        ([[5, 5]], "rank 5 stands twice"),
        ([-1, 0], "rank -1 .* lies outside the world: ranks count from 0"),
        (range(2, -3, -1), "rank -2 .* lies outside the world"),
        ([], "is empty"),
        (range(0), "is empty"),
        ([[], []], "is empty"),
        ([[0, 1], [2]], "not a grid: its rows have different lengths"),
        ([0.0, 1.0], "holds float64, and ranks are ints"),
        ([True, False], "holds bool, and ranks are ints"),
        (["0"], "ranks are ints"),
        (None, "ranks are ints"),
    ],
    ids=str,
)
def test_ranks_that_make_no_grid_are_an_error(ranks, message):
    with pytest.raises(ValueError, match=message):
        Placement("cpu", ranks)


@pytest.mark.parametrize("kind", ["gpu", "", None, "cuda:0"])
def test_unknown_device_type_is_an_error(kind):
    with pytest.raises(ValueError, match='not a device type. Use "cpu" or "cuda"'):
        Placement(kind, [0])


@pytest.mark.parametrize(("kind", "near"), [("gpu", "cuda"), ("cuda:0", "cuda"), ("CPU", "cpu")])
def test_the_nearest_device_type_is_suggested(kind, near):
    with pytest.raises(ValueError, match=f"Did you mean {near!r}"):
        Placement(kind, [0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error():
    with pytest.raises(RuntimeError, match="this process sees no GPU"):
        Placement("cuda", [0])


def test_the_name_of_an_axis_is_no_list_of_letters():
    with pytest.raises(ValueError, match=r"give names: axes=\('dp',\)"):
        Placement("cpu", [[0, 1], [2, 3]], axes="dp")


@pytest.mark.parametrize("axes", [["dp"], ["dp", "dp"], ["a", "b", "c"]], ids=str)
def test_axis_names_must_fit_the_grid(axes):
    with pytest.raises(ValueError, match="one name per axis, each once"):
        Placement("cpu", [[0, 1], [2, 3]], axes=axes)


def outside(rank: int) -> str:
    assert Placement.all("cpu") == Placement("cpu", [0, 1])
    try:
        Placement("cpu", [0, 2])
    except ValueError as error:
        return str(error)
    return ""


def test_rank_outside_the_world_is_an_error_with_both_numbers():
    for message in pool(2).run(outside):
        assert (
            "rank 2 in ranks=[0, 2] lies outside the world: the world has 2 ranks (0 to 1)"
            in message
        )


# -- size ------------------------------------------------------------------------------------------


def bytes_kept(ranks) -> int:
    """The least of several tries: what other threads allocate meanwhile is counted too."""
    return min(_bytes_kept(ranks) for _ in range(5))


def _bytes_kept(ranks) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        placement = Placement("cpu", ranks)
        placement.coordinate_of(1), placement.rank_at((1,) * placement.ndim), hash(placement)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (range(2), range(65536)),
        (range(0, 4, 2), range(0, 131072, 2)),
        (np.arange(4).reshape(2, 2), np.arange(65536).reshape(256, 256)),
        (np.arange(4).reshape(2, 2).T, np.arange(65536).reshape(256, 256).T),
    ],
    ids=["range", "every second", "grid", "transposed grid"],
)
def test_65536_ranks_take_no_more_memory_than_two(few, many):
    bytes_kept(few)  # first call: imports and caches
    assert bytes_kept(many) <= bytes_kept(few) + 512


@pytest.mark.parametrize("given", ["cpu", 0, S(0), None, torch.device("cpu")], ids=repr)
def test_what_is_no_placement_is_an_error_that_says_how_to_write_one(given):
    with pytest.raises(TypeError, match=r'f: .*not a placement. Write placement\("cpu"'):
        check_placement("f", given)


def test_a_device_mesh_is_told_as_a_placement():
    class DeviceMesh:  # torch's own needs a process group
        device_type, mesh, mesh_dim_names = "cpu", torch.tensor([[0, 1]]), ("dp", "tp")

    wanted = """Write placement("cpu", [[0, 1]], axes=('dp', 'tp'))."""
    with pytest.raises(TypeError, match=re.escape(wanted)):
        check_placement("f", DeviceMesh())
