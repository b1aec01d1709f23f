"""Modes of torch that change what an op computes or keeps, over several placements: ranks outside
of one go the same way as those inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, Placement, S
from tests.ranks import in_turn, pool
from tests.twins import assert_same, randn

# Stages of a net, each on a placement of its own: one rank is in the first two, one in the last.
STAGES = {
    2: [([0], S(0)), ([1], B), ([1, 0], S(1))],
    3: [([0, 1], S(0)), ([2], B), ([1, 2], S(1))],
    4: [([0, 1, 2], S(0)), ([3], B), ([[0, 3], [1, 2]], S(1))],
}


class Net(nn.Module):
    """Convolution, normalisation, attention and products; plain where ``world`` is None."""

    def __init__(self, world: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            [nn.Conv1d(3, 6, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 5)]
        )
        self.norm = nn.LayerNorm(8)
        self.homes = [] if world is None else STAGES[world]
        for i, (ranks, entry) in enumerate(self.homes):
            self._place(self.stages[i], ranks, {"weight": entry})
        if self.homes:
            self._place(self.norm, self.homes[1][0], {})

    @staticmethod
    def _place(module: nn.Module, ranks: Any, plan: dict) -> None:
        placement = Placement("cpu", ranks)
        axes = placement.ndim
        consistent.parallelize(module, placement, {k: (v, B)[:axes] for k, v in plan.items()})

    def given(self, x: torch.Tensor, stage: int) -> Any:
        return self.at(x, stage) if self.homes else x

    def at(self, x: torch.Tensor, stage: int) -> Any:
        placement = Placement("cpu", self.homes[stage][0])
        return consistent.distribute(x, placement, (S(0), B)[: placement.ndim])

    def _move(self, x: Any, stage: int) -> Any:
        if not self.homes:
            return x
        placement = Placement("cpu", self.homes[stage][0])
        return x.to_global(placement=placement, sbp=(S(0), B)[: placement.ndim])

    def forward(self, x: Any) -> Any:
        h = self._move(self.stages[0](x).relu(), 1)
        h = self.norm(self.stages[1](h))
        h = h + F.scaled_dot_product_attention(h, h, h)
        h = self._move(torch.cat([h, h.to(self.norm.weight.dtype)], 1).softmax(1), 2)
        return self.stages[2](h).mean(1)


def _loss(net: Net, step: int) -> Any:
    dtype: Any = net.norm.weight.dtype
    x = net.given(randn(6, 3, 8, seed=step).to(dtype), 0)
    y = torch.tensor([0, 4, 2, 1, 3, 0])
    return F.cross_entropy(net(x).to(dtype), net.given(y, 2))


def autocast(net: Net) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(net, 0)
    loss.backward()
    # Values in bfloat16 are compared in a case of their own: sums differ in their last bits.
    grads = [p.grad for p in net.parameters()]
    assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in grads)
    assert abs(float(loss) - float(_loss(net, 0))) < 0.05
    return loss.dtype, [g.norm().log().round() for g in grads if float(g.norm()) > 1e-3][:1]


def autocast_left_inside(net: Net) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        x = net.given(randn(6, 8).float(), 1)
        h = net.stages[1](x)
        with torch.autocast("cpu", enabled=False):
            inner = h.float() @ net.stages[1].weight
        return [t.dtype for t in (h, inner, h @ h.T, h.softmax(0), torch.cat([h, inner]))]


def scaler(net: Net) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scale, seen = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), []
    for step in range(5):
        optimizer.zero_grad()
        scale.scale(_loss(net, step)).backward()
        if step in (1, 3):  # an overflow in one stage
            weight: Any = net.stages[step // 2].weight
            weight.grad = weight.grad * float("inf")
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scale.step(optimizer)
        scale.update()
        seen.append(scale.get_scale())
    return seen, list(net.parameters())


def lbfgs(net: Net) -> Any:
    net.double()
    found = []
    for search in (None, "strong_wolfe"):
        optimizer = torch.optim.LBFGS(
            net.parameters(), lr=0.1, max_iter=4, line_search_fn=search, history_size=2
        )

        def closure(optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = _loss(net, 0)
            loss.backward()
            return loss

        found += [float(optimizer.step(closure)) for _ in range(2)]
    return found, list(net.parameters())


def saved_on_cpu(net: Net) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = _loss(net, 0)
    loss.backward()
    return loss, [p.grad for p in net.parameters()]


def packed_by_hooks(net: Net) -> Any:
    """Hooks see shards; ranks outside have none of them, and keep what they keep."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda kept: kept[0])
    with hooks:
        loss = _loss(net, 0)
    loss.backward()
    return loss, [p.grad for p in net.parameters()]


def looked_through_for_nan(net: Net) -> Any:
    """Ranks outside have no values to look at, and meta tensors of none raise."""
    with torch.autograd.detect_anomaly(check_nan=True):
        _loss(net, 0).backward()
        (_loss(net, 1) * 2).backward()
        norms = [p.grad.square().sum() for p in net.parameters()]
    return norms, torch.is_anomaly_check_nan_enabled()


def clipped_one_by_one(net: Net) -> Any:
    _loss(net, 0).backward()
    found = [nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=how) for how in (False, None)]
    grads = [p.grad for p in net.parameters()]
    total = nn.utils.get_total_norm(grads, foreach=False)
    nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, total, foreach=False)
    return found, total, grads


CASES = [autocast, autocast_left_inside, scaler, lbfgs, saved_on_cpu, packed_by_hooks,
         looked_through_for_nan, clipped_one_by_one]  # fmt: skip


def _compare(rank: int, case: Callable[[Net], Any], world: int) -> None:
    warnings.simplefilter("ignore")
    assert_same(case(Net(world)), case(Net(None)))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_equals_plain_torch(case: Callable[[Net], Any]) -> None:
    for world in in_turn(CASES.index(case)):
        pool(world).run(_compare, case, world)
