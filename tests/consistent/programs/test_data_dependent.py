"""Ops whose result is as long as the data says, on global tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, S
from tests.ranks import pool

X = torch.arange(21, dtype=torch.float64).reshape(7, 3).sin()
N = torch.arange(21).reshape(7, 3) % 5

CALLS: dict[str, Callable[..., Any]] = {
    "x[mask]": lambda x, n: x[x > 0.3],
    "x[rows]": lambda x, n: x[x[:, 0] > 0],
    "none": lambda x, n: x[x > 2],
    "masked_select": lambda x, n: torch.masked_select(x, n == 2),
    "nonzero": lambda x, n: n.nonzero(),
    "nonzero tuple": lambda x, n: torch.nonzero(x > 0, as_tuple=True),
    "where": lambda x, n: torch.where(n > 2),
    "unique": lambda x, n: torch.unique(n, return_inverse=True, return_counts=True),
    "bincount": lambda x, n: torch.bincount(n[:, 0], minlength=3),
    "used further": lambda x, n: (x[x > 0] * 2).sort().values.sum(),
}


def _agree(rank: int, ranks: Any, sbp: Any) -> None:
    where = consistent.placement("cpu", ranks)
    for name, run in CALLS.items():
        for repeat in range(2):  # the second time by a known plan, with other data
            plain = (X + repeat).requires_grad_()
            x = consistent.distribute(X + repeat, where, sbp).requires_grad_()
            n = consistent.distribute(N, where, sbp)
            got, want = run(x, n), run(plain, N)
            pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True)
            for a, b in pairs:
                assert a.shape == b.shape, name
                torch.testing.assert_close(a.full(), b, check_device=False)
                if b.requires_grad:
                    a.square().sum().backward()
                    b.square().sum().backward()
                    torch.testing.assert_close(x.grad.full(), plain.grad, check_device=False)


@pytest.mark.parametrize("sbp", [S(0), S(1), B, P], ids=repr)
def test_results_agree_with_torch(sbp: Any) -> None:
    pool(3).run(_agree, [0, 1, 2], sbp)


def test_ranks_outside_the_placement_know_the_lengths() -> None:
    pool(3).run(_agree, [2, 0], S(0))


def test_two_axes_choose_for_themselves() -> None:
    pool(4).run(_agree, [[0, 1], [2, 3]], (S(0), S(1)))


def _refused(rank: int) -> str:
    x = torch.tensor([1, 2, 3, -4, 5] * 100_000)  # large enough to stay split
    with pytest.raises(RuntimeError) as caught:
        torch.bincount(consistent.distribute(x, consistent.placement.all("cpu"), S(0)))
    return str(caught.value)


def test_a_negative_number_is_refused_on_every_rank() -> None:
    assert all("holds -4" in message for message in pool(3).run(_refused))


def _stays_split(rank: int) -> tuple[Any, Any]:
    x = consistent.distribute(torch.randn(9000), consistent.placement.all("cpu"), S(0))
    with consistent.report() as report:
        rows = x[x > 0]
    return rows.sbp, list(report.whole)


def test_what_a_mask_picks_stays_split() -> None:
    assert pool(3).run(_stays_split) == [((S(0),), [])] * 3
