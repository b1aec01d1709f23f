"""plan="auto": what the search finds is what ``parallelize`` lays out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import consistent
from consistent import B
from tests.ranks import on_ranks

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
        assert torch.allclose(ours.grad.full(), wanted.grad)
    assert "seconds" in str(consistent.plan_of(model)) or consistent.plan_of(model).notes


def test_an_example_belongs_to_auto() -> None:
    placement = consistent.placement("cpu", [0])
    with pytest.raises(ValueError, match="there is none. Give example=batch"):
        consistent.parallelize(_model(), placement, "auto")
    with pytest.raises(ValueError, match="plan is 'data'. Write plan=\"auto\""):
        consistent.parallelize(_model(), placement, "data", example=X)
