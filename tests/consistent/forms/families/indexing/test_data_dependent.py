"""Facts about results as long as the data says that the brute force over rows does not name."""

from __future__ import annotations

import torch

from consistent.spec import S
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real


def test_rows_that_are_balanced_stay_where_they_are() -> None:
    x, mask = real(6, 100), torch.tensor([True, False] * 3)
    for (rows, shapes), sent in run_form(
        "select_by_mask", torch.Tensor.__getitem__, (x, mask), (S(0), S(0)), out=S(0)
    ):
        assert len(rows) == 1 and shapes == [(3, 100)] and sent <= 2 * 8


def test_rows_that_one_rank_has_are_evened_out() -> None:
    x, mask = real(6, 100), torch.tensor([True, True, False, False, False, False])
    made = run_form("select_by_mask", torch.Tensor.__getitem__, (x, mask), (S(0), S(0)), out=S(0))
    assert [len(rows) for (rows, _), _ in made] == [1, 1, 0]
    torch.testing.assert_close(torch.cat([rows for (rows, _), _ in made]), x[mask])


def test_unique_sends_what_is_unique_on_each_rank() -> None:
    x = torch.arange(3000) % 5
    for ((values, *_), _), sent in run_form("unique", torch._unique2, (x,), (S(0),)):
        assert values.tolist() == [0, 1, 2, 3, 4] and sent == 2 * (8 + 5 * 8)
