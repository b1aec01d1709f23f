"""A module object at several places of a model in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from consistent import Placement
from consistent.nn import pipeline
from tests.ranks import on_ranks
from tests.twins import assert_same

from .gpt import gradients


class Net(nn.Module):
    """One layer, or a recurrent one, before, between and after others."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = Recurrent() if recurrent else nn.Linear(4, 4)
        self.block = nn.Sequential(inner, nn.Tanh())
        self.net = nn.Sequential(
            self.block, nn.LayerNorm(4), self.block, nn.Tanh(), self.block, nn.Linear(4, 4)
        )
        self.double()

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.cell(x[:, None])[0][:, 0]


def loss_of(y: Any, _: Any) -> Any:
    return (y**2).mean()


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def same(net: Net, plain: Net, placements: list[Placement], split: Any, **options: Any) -> None:
    pipe = pipeline(net, placements, split, loss=loss_of, micro_batches=3, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (net, plain)]
    for k in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = loss_of(plain(rows(k)), None)
        wanted.backward()
        assert_same(pipe.step(rows(k), rows(k)), wanted)
        assert_same(gradients(net), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
    assert list(dict(net.named_parameters())) == list(dict(plain.named_parameters()))
    assert list(net.state_dict()) == list(plain.state_dict())
    assert_same(dict(net.named_parameters()), dict(plain.named_parameters()))


@on_ranks(2)
def test_each_stage_calls_the_one_layer(rank: int) -> None:
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    for split in (["net.1"], ["net.2"], ["net.5"]):
        for recurrent in (False, True):
            same(Net(recurrent), Net(recurrent), world, split)
    net: Any = Net()
    pipe = pipeline(net, world, ["net.3"], loss=loss_of, micro_batches=2, schedule="gpipe")
    assert net.net[0] is net.net[2] and net.net[4] is not net.net[0]
    assert net.net[4][0].weight is net.net[0][0].weight
    assert pipe.parts(1) == ["net.3", "net.4", "net.5"]


@on_ranks(3)
def test_three_stages_and_schedules_that_go_around(rank: int) -> None:
    world = [Placement("cpu", [r]) for r in range(3)]
    same(Net(), Net(), world, ["net.1", "net.3"])
    same(Net(), Net(), world, "auto", schedule="zbvzerobubble")


@pytest.mark.parametrize("plan", [["zero3", "tensor"], ["zero2", "data"]])
@on_ranks(4)
def test_stages_over_two_ranks_each(rank: int, plan: list[str]) -> None:
    world = [Placement("cpu", [0, 1]), Placement("cpu", [2, 3])]
    same(Net(), Net(), world, ["net.2"], plan=plan)


@on_ranks(2)
def test_buffers_in_two_stages_are_an_error_that_changes_nothing(rank: int) -> None:
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(norm, nn.Linear(4, 4), norm)
    world = [Placement("cpu", [0]), Placement("cpu", [1])]
    with pytest.raises(ValueError, match="'2' is in stage 1 and is the same BatchNorm1d as one in"):
        pipeline(net, world, ["1"], loss=loss_of)
    assert net[0] is net[2] is norm
