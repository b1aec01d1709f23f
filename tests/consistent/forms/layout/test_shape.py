from __future__ import annotations

import pytest
import torch

from consistent.forms import FORMS, Shards
from consistent.rules import Call, Operand, find_row
from consistent.spec import Placement, S, TensorSpec
from mirrored.transports.in_process import run_ranks
from tests.brute_force import check


def local(name: str, x: torch.Tensor, *args: object, **kwargs: object) -> list[torch.Tensor]:
    """What each of 3 ranks makes of its rows of ``x`` by form ``name``."""
    spec = TensorSpec.of(Placement("cpu", [0, 1, 2]), (S(0),), x.shape, x.dtype)
    operand = Operand(0, spec)
    func = {"squeeze": torch.squeeze, "triangular": torch.triu}[name]
    row = find_row(func.__name__)
    assert row is not None
    call = Call(func.__name__, (operand, *args), kwargs, (operand,), params=row._params)

    def main(rank: int) -> torch.Tensor:
        starts, sizes = spec.region((rank,))
        shard = x.narrow(0, starts[0], sizes[0])
        return FORMS[name](
            Shards(func, call, (0,), (shard,), (spec,), (spec,), (shard, *args), kwargs)
        )

    return run_ranks(main, 3)


def test_squeeze_keeps_a_dim_of_which_a_rank_holds_one_of_several() -> None:
    assert [tuple(y.shape) for y in local("squeeze", torch.ones(3, 1, 2))] == [(1, 2)] * 3
    assert [tuple(y.shape) for y in local("squeeze", torch.ones(2, 1), (0, 1))] == [
        (1,),
        (1,),
        (0,),
    ]


def test_the_diagonal_moves_with_the_shard() -> None:
    assert [y.tolist() for y in local("triangular", torch.ones(3, 3))] == [
        [[1, 1, 1]],
        [[0, 1, 1]],
        [[0, 0, 1]],
    ]


@pytest.mark.parametrize("grid", [2, 4, (2, 3)])
@pytest.mark.parametrize("diagonal", [-3, 0, 2])
def test_triangles_on_any_grid(grid: int | tuple[int, ...], diagonal: int) -> None:
    check(torch.tril, torch.randn(3, 5, dtype=torch.float64), diagonal, ranks=grid)
    check(torch.Tensor.triu_, torch.randn(2, 5, 3, dtype=torch.float64), diagonal, ranks=grid)


@pytest.mark.parametrize("grid", [2, 4, (2, 3)])
def test_squeeze_on_any_grid(grid: int | tuple[int, ...]) -> None:
    check(torch.squeeze, torch.randn(2, 1, 3, 1, dtype=torch.float64), ranks=grid)
    check(torch.squeeze, torch.randn(4, 1, dtype=torch.float64), 0, ranks=grid)
