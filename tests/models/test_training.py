"""Training does not depend on the plan: one seed gives the same numbers on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, S
from tests.ranks import ON_ONE_AXIS, pool

STEPS = 50


class Net(torch.nn.Module):
    """Convolution, dropout of both kinds, a wide dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.wide = torch.nn.Linear(4 * 16, 24)
        self.out = torch.nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout(torch.flatten(x, 1), 0.3, self.training)
        x = F.dropout(F.relu(self.wide(x)), 0.5, self.training)
        return self.out(x)


def curve(rank: int, layout: str) -> list[float]:
    """Losses of 50 steps; weights, data and masks all come from the global random numbers."""
    placement = consistent.placement.all("cpu")
    plan: dict[str, Any] = (
        {"wide.*": S(0)} if layout == "mixed" else {"*": S(0)} if layout == "sharded" else {}
    )
    torch.manual_seed(1)
    net = consistent.parallelize(Net().double(), placement, plan)
    torch.manual_seed(2)
    for p in net.parameters():
        torch.nn.init.normal_(p, 0.0, 0.2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    images = consistent.randn(10, 1, 8, 8, dtype=torch.float64, placement=placement, sbp=S(0))
    labels = consistent.randint(0, 5, (10,), placement=placement, sbp=B)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def alone() -> list[float]:
    (losses,) = pool(1).run(curve, "data")
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize("layout", ["data", "mixed", "sharded"])
@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
def test_training_with_dropout_gives_one_loss_curve_on_any_number_of_ranks(
    ranks: int, layout: str, alone: list[float]
) -> None:
    for losses in pool(ranks).run(curve, layout):
        assert losses == pytest.approx(alone, abs=1e-9)


def draw_unlike(rank: int) -> None:
    """Ranks seed differently, in check mode."""
    placement = consistent.placement.all("cpu")
    torch.manual_seed(rank)
    with consistent.check_mode():
        consistent.randn(3, placement=placement, sbp=B)


def test_check_mode_names_ranks_that_seeded_differently() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0: seed 0, op 0, rank 1: seed 1, op 0"):
        pool(2).run(draw_unlike)
