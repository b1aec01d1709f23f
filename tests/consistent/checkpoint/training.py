"""A small training whose model lies in any layout, for checkpoints to be taken of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, Placement, S
from tests.twins import GRIDS

# Number of ranks and layout of the weights, by name; sizes of 5, 7 and 3 do not divide.
LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, {}),
    "replicated": (2, {}),
    "rows": (2, {"*weight": S(0), "*bias": S(0)}),
    "columns": (2, {"first.weight": S(1), "last.weight": S(1), "table.weight": S(1)}),
    "three": (3, {"*weight": S(0), "first.bias": S(0)}),
    "twice": (4, {"*weight": (S(0), S(0)), "*bias": (B, S(0))}),
    "grid": (4, {"first.weight": (S(0), S(1)), "last.weight": (S(1), S(0)), "*": (S(0), B)}),
    "zero1": (3, "zero1"),
    "zero3": (2, "zero3"),
    "zero3 and tensor": (4, {"dp": "zero3", "tp": {"first.weight": S(0), "first.bias": S(0)}}),
}


class Net(nn.Module):
    """Tied weights, buffers, dropout, a tensor without elements, and a state that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 7)
        self.first, self.norm = nn.Linear(7, 7), nn.BatchNorm1d(7)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(7, 3, bias=False)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.table.weight
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.seen = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.drop(self.norm(self.first(self.table(tokens)))).relu()
        return self.last(x).square().mean() + F.cross_entropy(self.head(x), tokens)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Training:
    """A model, its optimizer and scheduler, in one of ``LAYOUTS``; "plain" is without the
    library."""

    def __init__(self, layout: str, seed: int = 0, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net().double()
        self.placement = None
        if layout != "plain":
            world, plan = LAYOUTS[layout]
            self.placement = Placement("cpu", [0] if world == 1 else GRIDS[world])
            consistent.parallelize(self.model, self.placement, plan)
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], 0.5)
        self.step = 0

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def run(self, steps: int) -> list[float]:
        """The losses of this many steps."""
        losses = []
        for _ in range(steps):
            made = torch.Generator().manual_seed(self.step)
            tokens: Any = torch.randint(0, 5, (6,), generator=made)
            if self.placement is not None:
                sbp = (S(0), *[B] * (self.placement.ndim - 1))
                tokens = consistent.distribute(tokens, self.placement, sbp)
            self.optimizer.zero_grad()
            loss = self.model(tokens)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
            self.step += 1
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        """The whole values of the model and of the optimizer's state."""
        found = {k: x for k, x in self.model.state_dict().items() if isinstance(x, torch.Tensor)}
        for k, (name, p) in enumerate(self.model.named_parameters()):
            for key, x in self.optimizer.state.get(p, {}).items():
                found[f"{k} {name} {key}"] = x
        return {k: whole(x).clone() for k, x in found.items()}


def whole(x: Any) -> torch.Tensor:
    """The whole value of a plain or global tensor."""
    return x.detach().full() if isinstance(x, consistent.GlobalTensor) else x.detach()
