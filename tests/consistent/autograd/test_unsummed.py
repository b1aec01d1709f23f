"""Gradients of gathered leaves (ZeRO-3) inside ``no_sync()``: kept without a message, in the object
that the user may hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks
from tests.twins import randn


def _pair(make: Any, placement: Placement) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    ours = make()
    ours.load_state_dict(plain.state_dict())
    return plain, consistent.parallelize(ours, placement, "zero3")


@pytest.mark.parametrize("sparse", [True, False])
@on_ranks(2)
def test_an_embedding_adds_up(rank: int, sparse: bool) -> None:
    placement = Placement("cpu", [0, 1])
    plain, ours = _pair(lambda: nn.Embedding(8, 4, sparse=sparse).double(), placement)
    batches = [torch.tensor(each) for each in ([0, 1, 1, 7], [1, 2, 3, 4], [0, 5, 6, 6])]
    for batch in batches:
        plain(batch).square().sum().backward()
    with consistent.no_sync():
        for batch in batches[:2]:
            ours(consistent.distribute(batch, placement, S(0))).square().sum().backward()
    ours(consistent.distribute(batches[2], placement, S(0))).square().sum().backward()
    wanted, found = plain.weight.grad, ours.weight.grad.full()
    dense = [x.to_dense() if x.is_sparse else x for x in (wanted, found)]
    torch.testing.assert_close(dense[1], dense[0])


@on_ranks(2)
def test_grad_stays_the_object_that_it_was(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    plain, ours = _pair(lambda: nn.Linear(4, 3).double(), placement)
    x = randn(6, 4)
    given = consistent.distribute(x, placement, S(0))
    ours(given).square().sum().backward()
    kept = [p.grad for p in ours.parameters()]
    with consistent.no_sync():
        ours(given).square().sum().backward()
    ours(given).square().sum().backward()
    for _ in range(3):
        plain(x).square().sum().backward()
    for p, grad, q in zip(ours.parameters(), kept, plain.parameters(), strict=True):
        assert p.grad is grad and grad.sbp == p.sbp
        torch.testing.assert_close(grad.full(), q.grad)


@on_ranks(3)
def test_ranks_outside_follow(rank: int) -> None:
    placement = Placement("cpu", [0, 1])
    plain, ours = _pair(lambda: nn.Linear(4, 3).double(), placement)
    x = randn(6, 4)
    plain(x).square().sum().backward()
    with consistent.no_sync():
        ours(consistent.distribute(x, placement, S(0))).square().sum().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full(), q.grad)
    ours(consistent.distribute(x, placement, S(0))).square().sum().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full(), 2 * q.grad)


@on_ranks(2)
def test_a_cast_copy_that_is_older_than_a_write_is_itself_kept(rank: int) -> None:
    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, self.weight.to(torch.float64))
            with torch.no_grad():
                self.weight.mul_(0.5)
            return y

    placement = Placement("cpu", [0, 1])
    plain, ours = _pair(lambda: Writes(4, 3, bias=False), placement)
    x = randn(6, 4)
    wanted, given = x.clone().requires_grad_(), consistent.distribute(x, placement, S(0))
    given.requires_grad_()
    plain(wanted).square().sum().backward()
    try:
        ours(given).square().sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(given.grad.full(), wanted.grad)
