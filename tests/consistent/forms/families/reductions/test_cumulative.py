"""Facts about scans along a split dim that the brute force over rows does not name."""

from __future__ import annotations

from typing import Any

import torch

from consistent.spec import P, S
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real


def _scanned(func: Any, tensors: tuple, sbps: tuple, dim: int) -> list:
    return run_form("cummax_or_cummin", func, tensors, sbps, dim)


def test_cummax_passes_one_value_and_one_index_a_row() -> None:
    few = {sent for _, sent in _scanned(torch.cummax, (real(4, 30),), (S(1),), 1)}
    many = {sent for _, sent in _scanned(torch.cummax, (real(4, 3000),), (S(1),), 1)}
    assert few == many and max(many) == 4 * (8 + 8) * 2


def test_the_last_of_equal_numbers_counts_across_ranks() -> None:
    x = torch.tensor([3.0, 1, 3, 0, 3, 2])
    indices = torch.cat([i for (_, i), _ in _scanned(torch.cummax, (x,), (S(0),), 0)])
    assert indices.tolist() == x.cummax(0).indices.tolist() == [0, 0, 2, 2, 4, 4]


def test_nan_on_one_rank_reaches_all_after_it() -> None:
    x = torch.tensor([1.0, torch.nan, 5, 0, 7, 2])
    values = torch.cat([v for (v, _), _ in _scanned(torch.cummin, (x,), (S(0),), 0)])
    torch.testing.assert_close(values, x.cummin(0).values, equal_nan=True)


def test_trapezoid_sends_nothing() -> None:
    x = real(7, 5)
    assert {sent for _, sent in run_form("trapezoid", torch.trapezoid, (x,), (S(1),), out=P)} == {0}
