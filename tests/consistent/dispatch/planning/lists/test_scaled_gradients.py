"""GradScaler: gradients are unscaled once, and all ranks find the same of them not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, P, Placement, S
from tests.ranks import in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn

LAYOUTS = [(B, B), (S(0), B), (S(0), S(0)), (P, B), (B, P), (S(0), P)]
SHAPES = [(4, 3), (5,), (1,), (2, 2)]


def unscaled(at: Laid) -> list[Any]:
    found = []
    for layout in LAYOUTS:
        for bad in (None, float("inf"), float("nan")):
            for place in range(4):
                grads = []
                for i, shape in enumerate(SHAPES):
                    x = randn(*shape, seed=i)
                    if bad is not None and i == place:
                        x.view(-1)[-1] = bad
                    grads.append(x if i == 2 else at(x, *layout))
                mark = torch.zeros(())
                torch._amp_foreach_non_finite_check_and_unscale_(grads, mark, torch.tensor(0.25))
                whole = grads if bad is None else grads[:place] + grads[place + 1 :]
                found.append((mark, whole))
    return found


def marks_and_factors_that_are_global(at: Laid) -> list[Any]:
    found = []
    for layout in ((B, B), (P, B)):
        grads = [at(randn(4, 3), S(0))]
        mark, factor = at(torch.zeros(()), *layout), at(torch.tensor(0.25), *layout)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, mark, factor)
        found.append((mark, grads))
    return found


def _model(at: Laid) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return at.module(net, {"0.weight": S(0), "0.bias": S(0), "2.weight": S(1)})


def scaler_trains(at: Laid, clip: bool, how: dict) -> list[Any]:
    """Eight steps; the third and the sixth overflow in one element, held by one rank."""
    net, seen = _model(at), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(8):
        optimizer.zero_grad()
        x = randn(5, 4, seed=step).float()
        loss = net(at(x, S(0))).square().mean()
        scaler.scale(loss).backward()
        if step in (2, 5):
            weight: Any = net[0].weight
            spoilt = torch.zeros(5, 4)
            spoilt[4, 3] = float("inf")
            weight.grad = weight.grad + at(spoilt, S(0))
        if clip:
            scaler.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        stepped = scaler.step(optimizer)
        scaler.update()
        seen += [stepped, scaler.get_scale(), scaler._growth_tracker, list(net.parameters())]
        seen = [x for x in seen if not (isinstance(x, torch.Tensor) and not x.isfinite().all())]
    return seen


def accumulated_without_sync(at: Laid) -> list[Any]:
    net = _model(at)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with consistent.no_sync():
        scaler.scale(net(at(randn(5, 4).float(), S(0))).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return list(net.parameters())


CASES = [unscaled, marks_and_factors_that_are_global, accumulated_without_sync]


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_torch(case: Any) -> None:
    for world in in_turn(CASES.index(case)):
        pool(world).run(compare, case, GRIDS[world])


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("clip", [False, True])
def test_scaler_skips_steps_on_all_ranks_together(clip: bool, number: int) -> None:
    how = [{"foreach": False}, {"foreach": True}, {"fused": True}][number]
    for world in in_turn(number + clip):
        pool(world).run(compare, scaler_trains, GRIDS[world], clip, how)


class _Stages(nn.Module):
    """Two layers, on a placement each, or on none."""

    def __init__(self, placements: list[Placement] | None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
        self.placements = placements
        for layer, placement in zip(self.layers, placements or [], strict=False):
            consistent.parallelize(layer, placement, {"weight": S(0)})

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            if self.placements is not None:
                x = x.to_global(placement=self.placements[i], sbp=B)
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("bad_layer", [0, 1])
@on_ranks(3)
def test_an_overflow_in_one_stage_stops_all(rank: int, bad_layer: int) -> None:
    found = []
    for placements in (None, [Placement("cpu", [0, 1]), Placement("cpu", [2])]):
        net, seen = _Stages(placements), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            x = randn(5, 4, seed=step).float()
            if placements is not None:
                x = consistent.distribute(x, placements[0], S(0))
            scaler.scale(net(x).square().mean()).backward()
            if step == 2:
                for p in net.layers[bad_layer].parameters():
                    p.grad = p.grad * float("inf")
            scaler.step(optimizer)
            scaler.update()
            seen += [scaler.get_scale(), [p.detach().clone() for p in net.parameters()]]
        found.append(seen)
    assert_same(found[1], found[0])
