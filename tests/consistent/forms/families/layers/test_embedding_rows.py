"""A table split by rows and indices split over the same ranks: rows are sent where they are looked
up, each once; values and derivatives are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import consistent
from consistent import B, Placement, S
from mirrored.transports.counting import counting
from tests.consistent.rules.examples.indexing import places
from tests.consistent.rules.examples.numbers import real
from tests.ranks import on_ranks

ROWS, COLUMNS = 11, 3
GRID = [[0, 1], [2, 3]]
TABLE = real(ROWS, COLUMNS)


def _derivatives(table: Any, index: Any, look_up: Any) -> list[Any]:
    """Value, first and second derivative."""
    y = look_up(index, table)
    (first,) = torch.autograd.grad(y.sin().sum(), table, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), table)
    return [y, first, second]


def _compare(placement: Placement, rows: Any, indices: Any, index: Any, look_up: Any) -> None:
    wanted = _derivatives(TABLE.clone().requires_grad_(), index, look_up)
    table = consistent.distribute(TABLE.clone(), placement, rows).requires_grad_()
    found = _derivatives(table, consistent.distribute(index, placement, indices), look_up)
    assert found[0].sbp == consistent.distribute(index, placement, indices).sbp
    for ours, plain in zip(found, wanted, strict=True):
        assert_close(ours.detach().full(), plain.detach())


def _padded(index: Any, table: Any) -> Any:
    return F.embedding(index, table, padding_idx=2)


@on_ranks(3)
def test_derivatives(rank: int) -> None:
    line = Placement.all("cpu")
    for indices in (S(0), S(1)):
        _compare(line, S(0), indices, places(ROWS, 7, 4), _padded)
    _compare(line, S(0), S(0), torch.full((5, 1), 2), F.embedding)  # all look up one row
    _compare(line, S(0), S(0), places(ROWS, 2, 2), F.embedding)  # one rank looks up nothing


@on_ranks(4)
def test_two_axes(rank: int) -> None:
    grid = Placement("cpu", GRID)
    for rows, indices in (((S(0), S(0)), (S(0), S(0))), ((S(0), B), (S(0), S(1)))):
        _compare(grid, rows, indices, places(ROWS, 7, 4), _padded)


@on_ranks(3)
def test_bags_of_one_size(rank: int) -> None:
    line, index = Placement.all("cpu"), places(ROWS, 7, 4)
    index[1] = 2
    each = real(7, 4)
    cases: list[dict[str, Any]] = [
        {"mode": "sum"}, {"mode": "mean"}, {"mode": "mean", "padding_idx": 2},
        {"mode": "sum", "per_sample_weights": each}, {"mode": "sum", "padding_idx": 2},
    ]  # fmt: skip
    for given in cases:
        wanted = TABLE.clone().requires_grad_()
        plain = F.embedding_bag(index, wanted, **given)
        plain.sin().sum().backward()
        table: Any = consistent.distribute(TABLE.clone(), line, S(0)).requires_grad_()
        laid: dict[str, Any] = given.copy()
        if "per_sample_weights" in given:
            laid["per_sample_weights"] = consistent.distribute(each, line, S(0))
        out: Any = F.embedding_bag(consistent.distribute(index, line, S(0)), table, **laid)
        assert out.sbp == (S(0),)
        out.sin().sum().backward()
        assert_close(out.detach().full(), plain.detach())
        assert_close(table.grad.full(), wanted.grad)


@on_ranks(3)
def test_each_missing_row_is_sent_once(rank: int) -> None:
    line, pieces = Placement.all("cpu"), [(0, 4), (4, 8), (8, 11)]
    index = places(ROWS, 9, 4)
    table = consistent.distribute(TABLE.clone(), line, S(0)).requires_grad_()
    split = consistent.distribute(index, line, S(0))
    with counting() as there:
        out = F.embedding(split, table)
    with counting() as back:
        out.sum().backward()
    asked = [set(part.flatten().tolist()) for part in index.chunk(3)]
    first, last = pieces[rank]
    missing = sum(not first <= row < last for row in asked[rank])
    given = sum(first <= row < last for k, rows in enumerate(asked) if k != rank for row in rows)
    each, counts = COLUMNS * 8, 2 * 8
    sent = [sum(c.bytes for c in log.calls if c.name == "all_to_all") for log in (there, back)]
    assert sent == [counts + missing * 8 + given * each, counts + missing * (8 + each)]


@on_ranks(2)
def test_a_row_that_is_not_there_is_an_error_on_every_rank(rank: int) -> None:
    line, index = Placement.all("cpu"), torch.zeros(4, dtype=torch.int64)
    index[3] = ROWS
    table = consistent.distribute(TABLE.clone(), line, S(0))
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(consistent.distribute(index, line, S(0)), table)
