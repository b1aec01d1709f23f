"""Facts about selections that the brute force over rows does not name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent.spec import Placement, S
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real
from tests.ranks import simulate


def test_what_a_median_sends_does_not_grow_with_the_tensor() -> None:
    few = {
        sent for _, sent in run_form("median_of_all", torch.median, (real(90).float(),), (S(0),))
    }
    many = {
        sent for _, sent in run_form("median_of_all", torch.median, (real(9000).float(),), (S(0),))
    }
    assert few == many and max(many) < 4 * 256 * 8 * 2


def test_every_place_of_the_order_is_found() -> None:
    x = torch.tensor([5.0, -1, 3, 3, -0.0, 7, 3, 0])
    for k in range(1, 9):
        for (value, _), _ in run_form("order_statistic", torch.kthvalue, (x,), (S(0),), k):
            assert value == x.sort().values[k - 1]


def test_the_first_of_equal_numbers_is_the_one_selected() -> None:
    x = torch.tensor([5.0, 3, 3, 3, 9, 3])
    for (_, index), _ in run_form("order_statistic", torch.kthvalue, (x,), (S(0),), 1):
        assert index == 1


def test_extreme_integers_are_selected() -> None:
    ends = torch.iinfo(torch.int64)
    x = torch.tensor([ends.max, 0, ends.min, -1, 1])
    for value, _ in run_form("median_of_all", torch.median, (x,), (S(0),)):
        assert value == 0


def _refuses(rank: int, function: Any, ranks: int, q: list[float]) -> None:
    placement = Placement("cpu", range(ranks))
    x = consistent.distribute(real(6, 4), placement, S(0))
    given = consistent.distribute(torch.tensor(q).double(), placement, S(0))
    with pytest.raises(RuntimeError, match=r"quantile\(\) q values must be in the range"):
        function(x, given, 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_a_quantile_out_of_range_is_refused(function: Any, ranks: int) -> None:
    for q in ([0.1, 2.0], [0.5, -0.1], [float("nan"), 1.0]):
        simulate(_refuses, 2, function, ranks, q)
