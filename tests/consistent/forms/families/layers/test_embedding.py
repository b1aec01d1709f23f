"""Facts about embedding in a table split by its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from consistent.movement.plain_values import plain_may_differ
from consistent.spec import P, Placement, S
from consistent.tensor.making.create import distribute
from mirrored.transports.counting import counting
from tests.brute_force import Expected, check
from tests.consistent.rules.examples.numbers import real, whole
from tests.ranks import pool


def _table(x: Any, ranks: int) -> Any:
    return distribute(x, Placement("cpu", range(ranks)), "S(0)")


def _programs(table: Any, index: Any) -> list:
    """Value, first and second derivative of embedding with a padded row."""
    y = F.embedding(index, table, padding_idx=2)
    (first,) = torch.autograd.grad(y.sin().sum(), table, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), table)
    return [y, first, second]


def _on_ranks(rank: int, x: Any, index: Any, ranks: int) -> list:
    made = _programs(_table(x, ranks).requires_grad_(), index)
    return [made[0].sbp, *(t.detach().full() for t in made)]


@pytest.mark.parametrize("rows", [2, 7])
def test_a_split_table_is_differentiable_twice(rows: int) -> None:
    x, index = real(rows + 1, 4), whole(5, 3, low=0, high=rows)
    wanted = _programs(x.clone().requires_grad_(), index)
    for sbp, *made in pool(3).run(_on_ranks, x, index, 3):
        assert sbp == (P,)
        for ours, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours, theirs.detach())


def _forwards(table: Any, tangent: Any, index: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(F.embedding(index, forward_ad.make_dual(table, tangent)))[1]


def _forwards_on_ranks(rank: int, x: Any, tangent: Any, index: Any) -> torch.Tensor:
    return _forwards(_table(x, 2), _table(tangent, 2), index).full()


def test_a_split_table_is_differentiable_forwards() -> None:
    x, tangent, index = real(5, 4), real(5, 4), whole(6, low=0, high=5)
    for made in pool(2).run(_forwards_on_ranks, x, tangent, index):
        torch.testing.assert_close(made, _forwards(x, tangent, index))


def _gradient_on_ranks(rank: int, x: Any, index: Any) -> tuple[torch.Tensor, int]:
    table = _table(x, 3).requires_grad_()
    with plain_may_differ(), counting() as log:
        F.embedding(index, table, scale_grad_by_freq=True).backward(torch.ones(30, 4).double())
    return table.grad.full(), log.bytes


def test_looking_up_and_back_sends_nothing_and_counts_the_whole_batch() -> None:
    x, index = real(7, 4), whole(30, low=0, high=7)
    leaf = x.clone().requires_grad_()
    F.embedding(index, leaf, scale_grad_by_freq=True).backward(torch.ones(30, 4).double())
    for grad, sent in pool(3).run(_gradient_on_ranks, x, index):
        torch.testing.assert_close(grad, leaf.grad)
        assert sent == 0


@pytest.mark.parametrize("grid", [2, 4, (2, 2)])
def test_frequencies_are_counted_on_any_grid(grid: Any) -> None:
    check(torch.embedding, real(7, 4), whole(9, low=0, high=7), 3, True, ranks=grid)


def test_rows_of_sparse_tables_are_fetched_and_never_masked() -> None:
    op = Expected(torch.embedding, (real(7, 4), whole(3, low=0, high=7), -1, False, True), {})
    by_rows = [s.form for s in op.signatures(0) if s.ins[0] == S(0)]
    assert by_rows == ["rows_of_owners"]
