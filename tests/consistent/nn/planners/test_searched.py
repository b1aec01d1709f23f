"""plan="auto": what the search finds is what ``parallelize`` lays out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import consistent
from consistent import B
from tests.ranks import on_ranks
from tests.twins import assert_same, randn

X = torch.arange(24.0, dtype=torch.float64).sin().view(4, 6)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 6)).double()


@on_ranks(2)
def test_auto_trains_as_plain_torch(rank: int) -> None:
    placement = consistent.placement("cpu", range(2))
    plain, model = _model(), _model()
    consistent.parallelize(model, placement, "auto", example=X, inputs=B)
    model(X).square().sum().backward()
    plain(X).square().sum().backward()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(ours.grad, wanted.grad, rtol=1e-12, atol=1e-12)
    assert "seconds" in str(consistent.plan_of(model)) or consistent.plan_of(model).notes


class Masked(nn.Module):
    """What is cheapest depends on whether all of a mask is true."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(512, 4096), nn.Linear(4096, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.relu(self.a(x)))
        return y if mask.all() else self.c(y) * mask.unsqueeze(-1)


@on_ranks(2)
def test_ranks_whose_examples_differ_get_one_plan(rank: int) -> None:
    torch.manual_seed(0)
    x, mask = randn(8, 512), torch.ones(8, dtype=torch.bool)
    model = Masked().double()
    wanted = model(x, mask)
    mask[0] = rank == 0
    place = consistent.placement.all("cpu")
    consistent.parallelize(model, place, "auto", example=(x, mask), verbose=False)
    assert_same(model(x, torch.ones(8, dtype=torch.bool)), wanted, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_all_ranks_raise_what_the_first_ones_search_says(rank: int) -> None:
    x, mask = torch.randn(8, 512), torch.ones(8, dtype=torch.bool)
    example = (x, mask.to("meta") if rank == 0 else mask)
    with pytest.raises(ValueError, match="reads a value"):
        consistent.parallelize(
            Masked(), consistent.placement.all("cpu"), "auto", example=example, verbose=False
        )


class Odd(Exception):
    """Cannot be made again from what it says."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b} are odd")


class Raises(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise Odd(1, 3)


@on_ranks(2)
def test_all_ranks_raise_what_a_model_raises(rank: int) -> None:
    place, x = consistent.placement.all("cpu"), torch.ones(2, 2)
    with pytest.raises(Odd if rank == 0 else RuntimeError, match="1 and 3 are odd"):
        consistent.parallelize(Raises(2, 2), place, "auto", example=x, verbose=False)


def test_an_example_belongs_to_auto() -> None:
    placement = consistent.placement("cpu", [0])
    with pytest.raises(ValueError, match="there is none. Give example=batch"):
        consistent.parallelize(_model(), placement, "auto")
    with pytest.raises(ValueError, match="plan is 'data'. Write plan=\"auto\""):
        consistent.parallelize(_model(), placement, "data", example=X)
