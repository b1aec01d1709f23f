"""Facts about the sample sort that the brute force over rows does not name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import Placement
from consistent.forms.families.reductions import sort, sort_cuts
from consistent.forms.families.reductions.sort_keys import sort_keys
from consistent.spec import S
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real, whole
from tests.ranks import SIZES, simulate


def test_keys_compare_as_torch_sorts() -> None:
    x = torch.tensor([3, torch.nan, -0.0, 0, torch.inf, -torch.inf, -2, 1e-40], dtype=torch.float32)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        order = x.to(dtype).sort(stable=True).indices
        assert torch.equal(sort_keys(x.to(dtype)).sort(stable=True).indices, order)
        order = x.to(dtype).sort(stable=True, descending=True).indices
        assert torch.equal(sort_keys(x.to(dtype), True).sort(stable=True).indices, order)


def test_sorting_sends_an_all_to_all_of_values_and_places_and_a_few_samples() -> None:
    n, ranks = 6000, 3
    moved = n * (4 + 4) * (ranks - 1) / ranks**2
    samples = 2 * 8 * 64 * ranks * (ranks - 1)
    for _, sent in run_form("sort", torch.sort, (real(n).float(),), (S(0),)):
        assert sent <= 1.2 * moved + samples + 100


def test_a_vector_that_lies_the_wrong_way_round_is_sorted() -> None:
    x = torch.arange(2000).flip(0)
    pieces = [values for (values, _), _ in run_form("sort", torch.sort, (x,), (S(0),))]
    assert torch.equal(torch.cat(pieces), torch.arange(2000))


def test_equal_numbers_spread_over_all_ranks() -> None:
    x = torch.zeros(3000)
    results = [made for made, _ in run_form("sort", torch.sort, (x,), (S(0),))]
    assert [len(values) for values, _ in results] == [1000] * 3
    assert torch.equal(torch.cat([indices for _, indices in results]), torch.arange(3000))


def test_few_distinct_numbers_stay_stable() -> None:
    x = whole(500, low=0, high=3)
    results = [made for made, _ in run_form("sort", torch.sort, (x,), (S(0),), ranks=4)]
    want = x.sort(stable=True)
    assert torch.equal(torch.cat([indices for _, indices in results]), want.indices)


def _sorted_exactly(x: torch.Tensor, ranks: int, descending: bool) -> None:
    results = [
        made for made, _ in run_form("sort", torch.sort, (x,), (S(0),), -1, descending, ranks=ranks)
    ]
    want = x.sort(descending=descending, stable=True)
    assert torch.equal(torch.cat([values for values, _ in results]), want.values)
    assert torch.equal(torch.cat([indices for _, indices in results]), want.indices)


@pytest.mark.parametrize("samples", [1, 2, 64])
@pytest.mark.parametrize("ranks", SIZES)
def test_cuts_are_exact_whatever_is_sampled(ranks: int, samples: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(sort, "SAMPLES", 0)  # nothing is gathered
    monkeypatch.setattr(sort_cuts, "SAMPLES", samples)
    for n in (1, 5, 12, 331):
        for x in (real(n), whole(n, low=0, high=3).float(), torch.zeros(n), torch.arange(n * 1.0)):
            _sorted_exactly(x, ranks, False)
            _sorted_exactly(-x, ranks, True)


def test_the_gradient_of_an_exchange_goes_back_the_way_it_came(monkeypatch: Any) -> None:
    monkeypatch.setattr(sort, "SAMPLES", 0)
    x, weight = real(301).double(), torch.arange(301.0).double()
    want = x.clone().requires_grad_()
    (want.sort().values * weight).pow(2).sum().backward()

    def main(rank: int) -> torch.Tensor:
        p = Placement("cpu", range(3))
        mine = consistent.distribute(x, p, S(0)).requires_grad_()
        (mine.sort().values * consistent.distribute(weight, p, S(0))).pow(2).sum().backward()
        assert mine.grad is not None
        return mine.grad.full()

    for found in simulate(main, 3):
        torch.testing.assert_close(found, want.grad)


def test_short_pieces_are_gathered_in_one_message() -> None:
    x = real(12, 200)
    for _, sent in run_form("sort", torch.sort, (x,), (S(1),), ranks=2):
        assert sent == x.nbytes / 2
