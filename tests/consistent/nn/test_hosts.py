"""Training gives the same losses and parameters wherever ranks are: on one host, where they share
memory; each on its own; some here and some there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, S
from consistent.nn.planners import PLANNERS
from tests.mirrored.kinds import over_gloo
from tests.mirrored.transports.several_hosts.kinds import on_hosts
from tests.ranks import ALL, pool

STEPS = 20 if ALL else 2  # the second knows the order in which the first gathers
LINE = [0, 1, 2, 3]
GRID = [[0, 1], [2, 3]]
# By hosts of the ranks: those of "tp" are neighbours, or "dp" are.
PLANS: list[tuple[list, Any]] = [
    *((LINE, name) for name in PLANNERS if name not in ("expert", "hf")),
    (LINE, {"*": S(0)}),
    (GRID, {"dp": "data", "tp": "tensor"}),
    (GRID, {"dp": "zero3", "tp": "tensor"}),
    (GRID, {"dp": "tensor", "tp": "zero3"}),
    (GRID, {"dp": "zero2", "tp": "tensor+sequence"}),
]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            each(h).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A transformer whose gradients go in buckets, and its largest alone; of no even sizes."""

    def __init__(self, dim: int = 44, words: int = 97) -> None:
        super().__init__()
        self.token = nn.Embedding(words, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(2 if ALL else 1)))
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens)))


def trained(rank: int, ranks: list, plan: Any) -> list[Tensor]:
    """The losses of some steps, then the parameters."""
    torch.manual_seed(0)
    axes = ("dp", "tp") if isinstance(ranks[0], list) else None
    placement = consistent.Placement("cpu", ranks, axes=axes)
    model: Any = consistent.parallelize(Model(), placement, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(97, (6, 10), generator=torch.Generator().manual_seed(1))
    sbp = S(0) if axes is None else (S(0), B)
    tokens = consistent.distribute(text, placement, sbp)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().full())
    return [*losses, *(p.detach().full() for p in model.parameters())]


def trainings(rank: int, plans: list[tuple[list, Any]]) -> list[list[Tensor]]:
    return [trained(rank, *each) for each in plans]


def test_losses_and_parameters_are_those_of_one_host() -> None:
    together = pool(4).run(trainings, PLANS)[0]
    # Messages alone are what ranks on two hosts send between them.
    some = PLANS if ALL else PLANS[::2]
    apart, mixed = pool(4).run(over_gloo, trainings, some)[0], on_hosts("aabb", trainings, PLANS)[0]
    by_plan = dict(zip(map(str, PLANS), together, strict=True))
    for where, plans, found in (("messages", some, apart), ("two hosts", PLANS, mixed)):
        for plan, own in zip(plans, found, strict=True):
            assert all(map(torch.equal, own, by_plan[str(plan)])), f"{plan}, {where}"
