"""The two ways in, on gloo pools of 2 and 3 ranks and on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import consistent
from consistent import B, P, Placement, S
from tests.ranks import ON_ONE_AXIS, RankError, pool, simulate

ROWS = 7  # does not divide by 2 or 3
WHOLE = torch.arange(ROWS * 2, dtype=torch.float64).reshape(ROWS, 2)


def _world(n: int) -> Placement:
    return Placement("cpu", range(n))


# -- from_local ------------------------------------------------------------------------------------


def _split_pieces(rank: int, n: int) -> tuple:
    piece = torch.tensor_split(WHOLE, n)[rank].clone()
    x = consistent.from_local(piece, _world(n), S(0))
    return (
        x.full(),
        tuple(x.shape),
        type(piece) is torch.Tensor,
        x.to_local().data_ptr() == piece.data_ptr(),
    )


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_from_local_joins_split_pieces_and_shares_their_storage(n: int) -> None:
    for full, shape, untouched, shared in pool(n).run(_split_pieces, n):
        assert shape == (ROWS, 2) and untouched and shared
        assert torch.equal(full, WHOLE)


def _partial_pieces(rank: int, n: int) -> Any:
    return consistent.from_local(WHOLE * (rank + 1), _world(n), P).full()


def test_from_local_adds_partial_pieces() -> None:
    for full in pool(3).run(_partial_pieces, 3):
        assert torch.equal(full, WHOLE * 6)


def _on_a_grid(rank: int, n: int, shape: tuple[int, ...] | None) -> tuple:
    grid = Placement("cpu", torch.arange(n).view(2, -1).numpy())
    spec = consistent.TensorSpec.of(grid, (S(0), S(0)), WHOLE.shape, WHOLE.dtype)
    starts, sizes = spec.region(grid.coordinate_of(rank))
    piece = WHOLE[starts[0] : starts[0] + sizes[0]]
    x = consistent.from_local(piece, grid, (S(0), S(0)), shape=shape)
    return x.full(), x._spec is spec


@pytest.mark.parametrize("shape", [None, (ROWS, 2)])
def test_from_local_joins_a_dim_split_by_two_axes(shape: tuple[int, ...] | None) -> None:
    for full, same in simulate(_on_a_grid, 4, 4, shape):
        assert same and torch.equal(full, WHOLE)


def _gradient_of_pieces(rank: int, n: int) -> list[torch.Tensor]:
    found = []
    for sbp in (S(0), B, P):
        piece = (
            torch.tensor_split(WHOLE, n)[rank] if sbp is not B and sbp is not P else WHOLE
        ).clone()
        piece.requires_grad_()
        y = consistent.from_local(piece, _world(n), sbp)
        (y * _weights(n)).sum().backward()
        assert type(piece.grad) is torch.Tensor
        found.append(piece.grad)
    return found


def _weights(n: int) -> Any:
    return consistent.distribute(WHOLE + 1, _world(n), B)


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_from_local_gives_the_piece_its_dual_gradient(n: int) -> None:
    by_rank = pool(n).run(_gradient_of_pieces, n)
    assert torch.equal(torch.cat([g[0] for g in by_rank]), WHOLE + 1)  # S -> S
    assert torch.equal(sum(g[1] for g in by_rank), WHOLE + 1)  # B -> P
    assert all(torch.equal(g[2], WHOLE + 1) for g in by_rank)  # P -> B


def _outside(rank: int) -> tuple:
    where = Placement("cpu", [2, 0])
    piece = (
        WHOLE[:3] if rank == 0 else WHOLE[:4] if rank == 2 else torch.empty(0, dtype=torch.float32)
    )
    x = consistent.from_local(piece, where, S(0))
    return x.full(), x._spec, tuple(x.to_local().shape)


def test_from_local_tells_ranks_outside_the_placement() -> None:
    results = pool(3).run(_outside)
    assert len({spec for _, spec, _ in results}) == 1
    assert all(torch.equal(full, torch.cat([WHOLE[:4], WHOLE[:3]])) for full, _, _ in results)
    assert [shape for _, _, shape in results] == [(3, 2), (0,), (4, 2)]


def _unbalanced(rank: int) -> None:
    consistent.from_local(torch.zeros(1 if rank == 1 else 3), _world(3), S(0))


def test_from_local_names_the_rank_whose_piece_is_off() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has a piece of shape \(1,\).*it holds \(2,\)"):
        pool(3).run(_unbalanced)


def _other_dtype(rank: int) -> None:
    consistent.from_local(
        torch.zeros(3, dtype=torch.int64 if rank else torch.float32), _world(2), S(0)
    )


def test_from_local_names_ranks_that_disagree() -> None:
    with pytest.raises(
        ValueError, match=r"rank 0 gives torch.float32[\s\S]*rank 1 gives torch.int64"
    ):
        pool(2).run(_other_dtype)


def _unequal(rank: int, check: bool) -> None:
    consistent.from_local(torch.full((2,), float(rank == 2)), _world(3), B, check=check)


def test_from_local_compares_broadcast_values_when_asked() -> None:
    pool(3).run(_unequal, False)
    with pytest.raises(ValueError, match="ranks 0 and 2 must have the same values"):
        pool(3).run(_unequal, True)


def _wrong_shape(rank: int) -> None:
    consistent.from_local(torch.zeros(3 + rank), _world(2), S(0), shape=(6,))


def test_from_local_checks_a_given_shape_without_asking_the_others() -> None:
    with pytest.raises(RankError, match=r"rank 1 has a piece of shape \(4,\)"):
        pool(2).run(_wrong_shape)


# -- distribute ------------------------------------------------------------------------------------


def _distributed(rank: int, n: int) -> list:
    found = []
    for sbp in (B, P, S(0), S(1), S(-1)):
        x = WHOLE.clone().requires_grad_()
        y = consistent.distribute(x, _world(n), sbp)
        ((y * y).sum() * 3).backward()
        found.append((y.full(), x.grad, y.sbp))
    return found


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_distribute_keeps_the_value_and_returns_the_whole_gradient(n: int) -> None:
    for found in pool(n).run(_distributed, n):
        for full, grad, _sbp in found:
            assert torch.equal(full, WHOLE)
            assert torch.equal(grad, 6 * WHOLE)
        assert found[-1][2] == (S(1),)


def _owns(rank: int) -> bool:
    x = torch.zeros(4)
    consistent.distribute(x, _world(2), B).fill_(1)
    return bool((x == 0).all())


def test_distribute_does_not_share_storage() -> None:
    assert pool(2).run(_owns) == [True, True]


def _distribute_outside(rank: int) -> tuple:
    x = torch.ones(4, requires_grad=True)
    y = consistent.distribute(x, Placement("cpu", [1]), S(0))
    (y * 2).sum().backward()
    return y.full(), x.grad


def test_distribute_runs_on_ranks_outside_the_placement() -> None:
    (full, none), (_, grad) = pool(2).run(_distribute_outside)
    assert torch.equal(full, torch.ones(4))
    assert none is None and torch.equal(grad, torch.full((4,), 2.0))


def _distribute_unequal(rank: int, check: bool) -> None:
    consistent.distribute(torch.tensor([float(rank)]), _world(2), B, check=check)


def test_distribute_compares_values_when_asked() -> None:
    pool(2).run(_distribute_unequal, False)
    with pytest.raises(ValueError, match="ranks 0 and 1 must have the same values"):
        pool(2).run(_distribute_unequal, True)


# -- what is refused -------------------------------------------------------------------------------


def test_a_bool_cannot_be_partial() -> None:
    with pytest.raises(ValueError, match="truth values have no sum"):
        consistent.distribute(torch.tensor([True]), _world(1), P)


def test_a_placement_of_several_ranks_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="is of 2 ranks, and the world has 1 rank"):
        consistent.distribute(torch.zeros(2), _world(2), B)


@pytest.mark.parametrize("make", [consistent.distribute, consistent.from_local])
def test_what_is_no_tensor_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="is of type list, and not a tensor. Write"):
        make([1.0, 2.0], _world(1), B)


def _with_a_dtensor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    y = consistent.ones(4, 2, placement=_world(2), sbp=S(0))
    for call in (
        lambda: consistent.from_local(x, _world(2), S(0)),
        lambda: consistent.distribute(x, _world(2), S(0)),
        lambda: y + x,
        lambda: x + y,
        lambda: torch.cat([y, x]),
        lambda: torch.nn.functional.linear(y, x),
    ):
        with pytest.raises(RuntimeError, match="a DTensor is given.*checkpoint.from_dtensor"):
            call()


def test_a_dtensor_is_to_be_converted() -> None:
    pool(2).run(_with_a_dtensor)


def test_the_number_of_sbps_is_the_number_of_axes() -> None:
    with pytest.raises(ValueError, match="2 entries"):
        consistent.distribute(torch.zeros(2), _world(1), (B, B))


def test_a_global_tensor_is_not_cut_again() -> None:
    x = consistent.distribute(torch.zeros(2), _world(1), B)
    for make in (consistent.distribute, consistent.from_local):
        with pytest.raises(TypeError, match="global tensor already"):
            make(x, _world(1), B)


HERE = Placement("cpu", [0])


@pytest.mark.parametrize(
    "call",
    [
        lambda given: consistent.zeros(2, placement=given, sbp=B),
        lambda given: consistent.distribute(torch.zeros(2), given, B),
        lambda given: consistent.from_local(torch.zeros(2), given, B),
        lambda given: consistent.zeros(2, placement=HERE, sbp=B).to_global(given, B),
        lambda given: consistent.parallelize(torch.nn.Linear(2, 2), given),
        lambda given: consistent.data.loader([torch.zeros(2)], given),
        lambda given: consistent.nn.pipeline(torch.nn.Linear(2, 2), [given], loss=None),
        lambda given: consistent.placement_scope(given).__enter__(),
    ],
    ids="zeros distribute from_local to_global parallelize loader pipeline placement_scope".split(),
)
def test_what_is_no_placement_is_an_error_that_says_how_to_write_one(call: Any) -> None:
    for given in ("cpu", S(0), torch.device("cpu")):
        with pytest.raises(TypeError, match=r'not a placement. Write placement\("cpu"'):
            call(given)
