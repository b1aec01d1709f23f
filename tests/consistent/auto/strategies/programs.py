"""Strategies that run on ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consistent.auto import Strategy


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Four equal blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made() -> tuple[Model, Tensor, Tensor]:
    """A model and a batch."""
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.randn(8, 8).double(), torch.randint(5, (8,))


def losses(strategy: Strategy | None, steps: int = 3) -> list[float]:
    """Of some steps; without a strategy those of plain torch."""
    model, x, y = made()
    pipe = None if strategy is None else strategy.apply(model, F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        if pipe is None:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        else:
            loss = pipe.step(x, y)
        optimizer.step()
        found.append(float(loss))
    return found


def run(rank: int, path: str) -> list[float]:
    """The losses of a strategy in a file."""
    return losses(Strategy.load(Path(path)))
