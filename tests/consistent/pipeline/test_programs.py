"""What a pipeline records: a program for each shape, and for each set of trained parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from consistent.nn import pipeline
from consistent.pipeline import engine
from tests.ranks import on_ranks
from tests.twins import assert_same, randn

from .gpt import gradients
from .test_pipeline import one_each


class Net(nn.Module):
    """Four layers, and one in the last stage that batches of an odd number of rows do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.extra = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.extra(x) if x.shape[0] % 2 == 0 else x


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, 4, seed=rows), randn(rows, 4, seed=-rows)


@on_ranks(2)
def test_more_shapes_than_are_kept(rank: int) -> None:
    plain, kept = Net(), engine.MOST
    pipe = pipeline(Net(), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=2)
    engine.MOST = 2
    try:
        for rows in 3 * [1, 2, 3, 4, 6, 5]:
            x, y = batch(2 * rows)
            plain.zero_grad()
            pipe.model.zero_grad()
            pipe.step(x, y)
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.mse_loss(plain(a), b) / 2).backward()
            mine, wanted = gradients(pipe.model), gradients(plain)
            for name, grad in wanted.items():
                assert (mine[name] is None) == (grad is None), (rows, name)
                if grad is not None:
                    assert_same(mine[name], grad)
    finally:
        engine.MOST = kept


FREEZES = {
    "first stage": ["layers.0", "layers.1"],
    "last stage": ["layers.2", "layers.3", "extra"],
    "a part of each": ["layers.0", "layers.3"],
}


@on_ranks(2)
def test_parameters_that_are_frozen_between_steps(rank: int) -> None:
    for (_, names), schedule in zip(FREEZES.items(), ("1f1b", "gpipe", "1f1b"), strict=True):
        plain = Net()
        pipe = pipeline(
            Net(), one_each(), ["layers.2"], loss=F.mse_loss, micro_batches=2, schedule=schedule
        )
        twins = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (plain, pipe.model)]
        for step, frozen in enumerate([False, True, True, False]):
            for net, optimizer in twins:
                for name in names:
                    net.get_submodule(name).requires_grad_(not frozen)
                if step != 1:  # there frozen parameters have the gradients of the step before
                    optimizer.zero_grad()
            x, y = batch(4)
            F.mse_loss(plain(x), y).backward()
            assert_same(pipe.step(x, y), F.mse_loss(plain(x), y))
            norms = []
            for net, optimizer in twins:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
                optimizer.step()
            assert_same(norms[1], norms[0])
        assert_same(dict(pipe.model.named_parameters()), dict(plain.named_parameters()))
