"""Along an axis of one rank S, B and P say the same, so a plan costs there what ``data`` costs: its
tensors are B, nothing is gathered, and no border boxes. What was asked for is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn.planners import PLANNERS
from mirrored.transports.counting import counting
from tests.ranks import on_ranks

STRATEGIES = [name for name in PLANNERS if name not in ("expert", "hf")]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def _asked(module: nn.Module) -> Any:
    layouts = consistent.plan_of(module).layouts("0.weight")
    return layouts and layouts.sbp


def hooks(module: nn.Module) -> list[Any]:
    return [h for m in module.modules() for h in (*m._forward_pre_hooks.values(),
                                                  *m._forward_hooks.values())]  # fmt: skip


@pytest.mark.parametrize("plan", STRATEGIES)
def test_every_plan_is_laid_out_as_data_and_says_what_was_asked(plan: Any) -> None:
    alone = Placement("cpu", [0])
    made: Any = consistent.parallelize(model(), alone, plan)
    asked: Any = consistent.parallelize(model(), Placement("cpu", [0]), plan)
    assert all(p.sbp == (B,) for p in made.parameters()) and not hooks(made)
    assert consistent.plan_of(made) == consistent.plan_of(asked)
    if plan == "zero3":
        assert _asked(made) == (S(0),)
    assert consistent.parallelize(made, alone, plan) is made  # the plan that it has
    optimizer = torch.optim.AdamW(made.parameters())
    made(consistent.ones(3, 6, placement=alone, sbp=S(0))).sum().backward()
    optimizer.step()
    assert all(x.sbp == (B,) for s in optimizer.state.values() for x in s.values() if x.ndim)


def test_what_only_says_how_tensors_lie_is_done_as_it_is() -> None:
    made: Any = consistent.parallelize(model(), Placement("cpu", [0]), {"*.weight": S(1)})
    assert made[0].weight.sbp == (S(1),) and made[0].bias.sbp == (B,) and not hooks(made)


@on_ranks(2)
def test_the_other_axis_does_as_it_was_told(rank: int) -> None:
    for ranks, mine in (([[0, 1]], 1), ([[0], [1]], 0)):
        grid = Placement("cpu", ranks, axes=("dp", "tp"))
        made: Any = consistent.parallelize(model(), grid, {"dp": "zero3", "tp": {"0.weight": S(0)}})
        weight: Any = made[0].weight
        assert weight.sbp == ((S(1), B) if mine == 0 else (B, S(0)))
        assert _asked(made) == (S(1), S(0))
        assert bool(hooks(made)) == (mine == 0)


@on_ranks(2)
def test_a_job_that_moves_away_from_one_rank_lies_as_was_asked(rank: int) -> None:
    alone, both = Placement("cpu", [1]), Placement("cpu", [0, 1])
    made: Any = consistent.parallelize(model(), alone, "zero3")
    values = [p.full() for p in made.parameters()]
    with counting() as sent:
        made(consistent.ones(3, 6, placement=alone, sbp=S(0))).sum().backward()
    assert not sent.names
    consistent.move(made, None, both)
    assert all(p.sbp == (S(0),) for p in made.parameters())
    assert all(torch.equal(p.full(), x) for p, x in zip(made.parameters(), values))
    consistent.move(made, None, alone)
    assert all(p.sbp == (B,) for p in made.parameters()) and not hooks(made)
