"""Steps over dims that are not cut in equal pieces are programs, with the values of the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks
from tests.twins import randn

DIM = 8


class Block(nn.Module):
    """x: [n, t, DIM] -> [n, t, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 3 * DIM),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


WEIGHTS: dict[str, Any] = {
    "whole": {"*": B},
    "blocks": {"qkv.weight": S(0, blocks=2), "qkv.bias": S(0, blocks=2)},
    "zigzag, and inner blocks": {"qkv.weight": S(0, cut="zigzag"), "out.weight": S(1, blocks=1)},
    "zero3": "zero3",
    "context": "context",
}


@on_ranks(2, 3)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_step_over_cuts_is_a_program(rank: int, weights: str) -> None:
    placement = Placement.all("cpu")
    ranks = placement.size
    tokens = 4 * ranks + 3
    sizes = [*range(ranks - 1), tokens - sum(range(ranks - 1))]
    cuts = [S(1, cut="zigzag"), S(1, blocks=2), S(1, sizes=sizes)]
    x, y = randn(2, tokens, DIM, seed=0).double(), randn(2, tokens, DIM, seed=1).double()

    def losses(cut: Any, compiles: bool) -> list[float]:
        torch.manual_seed(0)
        model = consistent.parallelize(Block().double(), placement, WEIGHTS[weights])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run: Any = consistent.compile(step, backend="ops") if compiles else step
        given = [consistent.distribute(each, placement, cut) for each in (x, y)]
        found = [run(*given).item() for _ in range(4)]
        assert not compiles or all(each.program is not None for each in run.programs), run.show()
        return found

    for cut in cuts:
        assert losses(cut, True) == pytest.approx(losses(cut, False), abs=1e-12)
