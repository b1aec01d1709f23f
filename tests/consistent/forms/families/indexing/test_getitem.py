from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent.spec import P, Placement, S
from consistent.tensor.making.create import distribute
from tests.brute_force import Expected, check
from tests.ranks import pool

_get = torch.Tensor.__getitem__
_set = torch.Tensor.__setitem__
GRIDS = [2, 3, 4, (2, 2), (2, 3)]


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rows", [2, 7])
def test_a_table_split_by_rows_is_looked_up_on_any_grid(grid: Any, rows: int) -> None:
    tokens = torch.randint(0, rows, (3, 4))
    check(torch.embedding, real(rows, 4), tokens, 1, ranks=grid)
    check(_get, real(rows, 4), (tokens - rows,), ranks=grid)
    check(torch.index_select, real(3, rows), 1, tokens[0], ranks=grid)
    check(torch.gather, real(3, rows), 1, tokens, ranks=grid)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rows", [2, 7])
def test_entries_reach_the_rank_that_holds_their_row(grid: Any, rows: int) -> None:
    at = torch.randint(0, rows, (6, 3))
    check(torch.scatter_add, real(rows, 3), 0, at, real(6, 3), ranks=grid)
    check(torch.Tensor.index_add_, real(rows, 3), 0, at[:, 0].contiguous(), real(6, 3), ranks=grid)
    check(torch.scatter_reduce, real(rows, 3), 0, at, real(6, 3), "amin", ranks=grid)


@pytest.mark.parametrize("grid", GRIDS)
def test_windows_on_any_grid(grid: Any) -> None:
    check(_get, real(5, 6), (slice(1, None, 3), slice(None, -1)), ranks=grid)
    check(_set, real(5, 6), (slice(1, None, 3), -1), real(2), ranks=grid)


def test_a_window_along_the_split_dim_is_read_without_moving_the_tensor() -> None:
    op = Expected(_get, (real(6, 4), slice(1, 3)), {})
    assert op.call.new_signature({0: S(0)}, P, "read_slice") in op.signatures(0)


def test_an_index_that_torch_refuses_is_refused_with_its_dim_split() -> None:
    with pytest.raises(IndexError, match="out of range"):
        pool(2).run(_look_up_too_far)


def _look_up_too_far(rank: int) -> None:
    weight = distribute(real(6, 4), Placement("cpu", [0, 1]), (S(0),))
    torch.embedding(weight, distribute(torch.tensor([6]), weight.placement, "B"))


def _in_place(rank: int) -> tuple:
    placement = Placement("cpu", [0, 1, 2])
    x = distribute(torch.arange(10.0).view(5, 2), placement, (S(0),))
    before = x.to_local().data_ptr()
    x[1:4, 0] = 7.0
    x[-1] = torch.tensor([8.0, 9.0])
    x[torch.tensor([0, 1])] = -1.0
    x[x > 7.5] = 0.0
    return x.full().tolist(), x.sbp, x.to_local().data_ptr() == before


def test_writing_reaches_the_tensor_itself() -> None:
    y = torch.arange(10.0).view(5, 2)
    y[1:4, 0] = 7.0
    y[-1] = torch.tensor([8.0, 9.0])
    y[torch.tensor([0, 1])] = -1.0
    y[y > 7.5] = 0.0
    for rank, (values, sbp, same_storage) in enumerate(pool(4).run(_in_place)):
        assert values == y.tolist() and sbp == (S(0),)
        assert same_storage or rank == 3
