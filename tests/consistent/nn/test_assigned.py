"""A state that is assigned to a parallelized module lies as the plan says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks
from tests.twins import assert_same, randn


def _net() -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net.double()


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon beside which the rounding of a gradient that ought to be 0 is nothing."""
    return torch.optim.AdamW(net.parameters(), lr=0.1, eps=1e-3)


@on_ranks(2)
def test_an_assigned_state_keeps_layouts_and_trains(rank: int) -> None:
    p, x = Placement("cpu", [0, 1]), randn(6, 4)
    for plan in ("data", "zero1", "zero3", {"*": S(0)}):
        torch.manual_seed(1)
        plain = _net()
        state = copy.deepcopy(plain.state_dict())
        model = consistent.parallelize(_net(), p, plan)
        before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        layouts = {name: value.sbp for name, value in before.items()}
        optimizer = _optimizer(model)
        model.load_state_dict(state, assign=True)
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert all(after[name] is value for name, value in before.items())
        assert {name: value.sbp for name, value in after.items()} == layouts
        assert_same(dict(model.state_dict()), dict(state))
        for net, of in ((plain, _optimizer(plain)), (model, optimizer)):
            given = x if net is plain else consistent.distribute(x, p, S(0))
            for _ in range(2):
                of.zero_grad()
                net(given).square().sum().backward()
                of.step()
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@on_ranks(2)
def test_an_assigned_state_brings_its_dtype(rank: int) -> None:
    p = Placement("cpu", [0, 1])
    state = nn.Linear(4, 4).double().state_dict()
    model = consistent.parallelize(nn.Linear(4, 4), p, "zero3")
    model.load_state_dict(state, assign=True)
    assert model.weight.dtype is torch.float64 and model.weight.sbp == (S(0),)
    assert model(torch.ones(2, 4, dtype=torch.float64)).dtype is torch.float64


@on_ranks(2)
def test_a_global_state_is_laid_as_the_module(rank: int) -> None:
    p = Placement("cpu", [0, 1])
    source = consistent.parallelize(nn.Linear(4, 4), p, "zero3")
    model = consistent.parallelize(nn.Linear(4, 4), p, "data")
    model.load_state_dict(source.state_dict(), assign=True)
    assert model.weight.sbp != source.weight.sbp
    assert_same(model.weight.full(), source.weight.full())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(4)}, assign=True)
