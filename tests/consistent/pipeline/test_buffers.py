"""Buffers of a model in stages: they are written once, by the ranks of one stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from consistent.nn import pipeline
from tests.ranks import on_ranks
from tests.twins import assert_same, randn

from .gpt import gradients
from .test_pipeline import one_each


class Normed(nn.Module):
    """With a module that has buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
        self.act, self.second = nn.Tanh(), nn.Linear(4, 4)
        self.third, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.double()

    def forward(self, x: Any) -> Any:
        return self.last(self.third(self.second(self.act(self.norm(self.first(x))))))


@on_ranks(2)
def test_modules_with_buffers_alone(rank: int) -> None:
    x, y = randn(6, 4, seed=1), randn(6, 4, seed=2)
    for schedule, names in (
        ("1f1b", ["second"]),
        ("interleaved1f1b", ["norm", "third", "last"]),
    ):
        plain = Normed()
        pipe = pipeline(
            Normed(), one_each(), names, loss=F.mse_loss, micro_batches=2, schedule=schedule
        )
        for _ in range(2):
            pipe.step(x, y)
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.mse_loss(plain(a), b) / 2).backward()
        assert_same(dict(pipe.model.named_buffers()), dict(plain.named_buffers()))
        assert_same(gradients(pipe.model), gradients(plain))


class Counts(Normed):
    """Writes a buffer of its own between its modules."""

    way = "itself"

    def forward(self, x: Any) -> Any:
        seen: Any = self.seen
        if self.way == "itself":
            seen.add_(1)
        elif self.way == "a view":
            seen[1:].view(-1).mul_(2)
        else:
            x = F.batch_norm(self.first(x), seen, seen + 1, training=True)
        return super().forward(x)


@on_ranks(2)
def test_a_buffer_written_between_modules_is_an_error(rank: int) -> None:
    for way, name in (("itself", "add_"), ("a view", "mul_"), ("statistics", "batch_norm")):
        model = Counts()
        model.way = way
        pipe = pipeline(model, one_each(), ["second"], loss=F.mse_loss, micro_batches=2)
        with pytest.raises(RuntimeError, match=f"{name} at .* writes into a plain tensor"):
            pipe.step(randn(6, 4), randn(6, 4))
