"""A step is recorded as often as it does something else, and then no more."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import cpu_vec_isa
from torch.fx import Graph, GraphModule

import consistent
from consistent import B, Placement, S
from consistent.compiled.backends import BACKENDS
from tests.consistent.compiled.steps import Made, beside
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, on_ranks, pool
from tests.twins import randn

CALLS = 9
_aten = torch.ops.aten

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
LAYOUTS = {"data": S(0), "zero3": S(0), "tensor": B}

# What a step does, and the programs that it needs.
WAYS = {
    "plain": 1,
    "zeros stay": 1,  # zero_grad(set_to_none=False)
    "zeros at the end": 1,
    "accumulated, no_sync": 1,
    "accumulated": 1,
    "micro-batches, a call each": 2,  # one call of two steps
    "schedule outside": 1,
    "clipped": 1,
    "last batch is short": 2,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 4, bias=False)
    ).double()


def made(plan: str, optimizer: str, way: str) -> Made:
    """A training step."""
    model = consistent.parallelize(net(), Placement.all("cpu"), plan)
    optim = OPTIMIZERS[optimizer](list(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.7)

    def backward(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def step(x: Any, y: Any, is_last: bool) -> Any:
        if way not in ("zeros at the end", "micro-batches, a call each"):
            optim.zero_grad(set_to_none=way != "zeros stay")
        if way == "accumulated, no_sync":
            with consistent.no_sync():
                backward(x * 2, y)
        elif way == "accumulated":
            backward(x * 2, y)
        loss = backward(x, y)
        if way == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if is_last:
            optim.step()
        if way in ("zeros at the end", "micro-batches, a call each") and is_last:
            optim.zero_grad()
        return loss

    return step, [model, optim, schedule]


def batches(plan: str, way: str) -> list[tuple]:
    """Rows, classes, and whether the optimizer steps."""
    layout, found = (Placement.all("cpu"), LAYOUTS[plan]), []
    for i in range(CALLS):
        rows = 4 if way == "last batch is short" and i % 3 == 2 else 8
        x, y = randn(rows, 6, seed=i), torch.arange(rows) % 4
        is_last = way != "micro-batches, a call each" or i % 2 == 1
        found.append((*(consistent.distribute(t, *layout) for t in (x, y)), is_last))
    return found


CYCLES: dict[str, Any] = {
    "OneCycleLR": lambda optim: torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, 20),
    "CyclicLR": lambda optim: torch.optim.lr_scheduler.CyclicLR(optim, 0.01, 0.1, 4),
}


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("optimizer", "programs"), [("SGD, momentum", 1), ("AdamW", 2)])
def test_programs_of_cycles(optimizer: str, programs: int, inside: bool, cycle: str) -> None:
    """They change momentum, too. AdamW has it in its program, until it is seen to change."""

    def make() -> Made:
        model = net()
        optim = OPTIMIZERS[optimizer](list(model.parameters()))
        schedule = CYCLES[cycle](optim)

        def step(x: Any) -> Any:
            optim.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optim.step()
            if inside:
                schedule.step()
            return loss

        return step, [model, optim, schedule]

    def after(changed: list[Any]) -> None:
        if not inside:
            changed[2].step()

    given = [(randn(8, 6, seed=i),) for i in range(CALLS)]
    found = beside(make, given, after=after)
    # A recording that changes what it was recorded with is none.
    assert len(found.programs) == (1 if inside else programs), found.show()


def check(plan: str, optimizer: str, way: str, backend: str = "ops") -> None:
    """Values are those of the eager step, and there are no more programs than it needs."""

    def after(changed: list[Any]) -> None:
        if way == "schedule outside":
            changed[2].step()

    found = beside(lambda: made(plan, optimizer, way), batches(plan, way), backend, after=after)
    assert len(found.programs) == WAYS[way], found.show()


EVERY = [(plan, optimizer) for optimizer in OPTIMIZERS for plan in LAYOUTS]
SOME = [("data", "SGD"), ("data", "AdamW"), ("zero3", "SGD, momentum"), ("zero3", "AdamW"),
        ("tensor", "SGD"), ("tensor", "Adam")]  # fmt: skip


@pytest.mark.parametrize(("plan", "optimizer"), EVERY if ALL else SOME)
@on_ranks(2)
def test_programs_of_plans_and_optimizers(rank: int, plan: str, optimizer: str) -> None:
    check(plan, optimizer, "plain")


@pytest.mark.parametrize(("plan", "optimizer"), EVERY if ALL else SOME[1::2])
def test_programs_between_hosts(plan: str, optimizer: str) -> None:
    """Gradients of an eager step come in messages there, those of a program may come alone."""
    pool(2).run(over_gloo, _check, plan, optimizer, "plain")


def _check(rank: int, *args: str) -> None:
    check(*args)


TRAINED = [("data", "SGD"), ("zero3", "AdamW"), ("tensor", "SGD, momentum")]
# What a step does, under zero3, and under one of the other plans in turn.
DONE = [
    (*trained, way)
    for number, way in enumerate(way for way in WAYS if way != "plain")
    for trained in (TRAINED if ALL else (TRAINED[1], TRAINED[number % 2 * 2]))
]


@pytest.mark.parametrize(("plan", "optimizer", "way"), DONE)
@on_ranks(2)
def test_programs_of_what_steps_do(rank: int, plan: str, optimizer: str, way: str) -> None:
    check(plan, optimizer, way)


@pytest.mark.skipif(not ALL, reason="test_steps.py counts those of a step under zero3")
@on_ranks(2, timeout=300)  # a machine that has compiled nothing yet takes a minute
def test_programs_of_inductor(rank: int) -> None:
    check("data", "SGD", "plain", "inductor")


def test_inductor_keeps_results_apart_and_views_together() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    both = graph.call_function(_aten.mul.Tensor, (x, 2.0))
    found: list[Any] = []
    for i in range(2):
        part = graph.call_function(_aten.slice.Tensor, (both, 0, i * 2, i * 2 + 2))
        found.append(graph.call_function(_aten.clone.default, (part,)))
        found.append(graph.call_function(_aten.clone.default, (both,)))
    found.append(graph.call_function(_aten.t.default, (found[-1],)))
    found.append(graph.call_function(_aten.t.default, (x,)))
    for i, node in enumerate(found):
        node.meta["memory"] = i
    found[4].meta["memory"], found[5].meta["memory"] = 3, "x"
    x.meta["memory"] = "x"
    graph.output(tuple(found))
    module, given = GraphModule(nn.Module(), graph), randn(4, 3)
    wanted = [t.clone() for t in module(given)]
    with patch.object(cpu_vec_isa, "valid_vec_isa_list", list):  # as for ranks, tests/inductor.py
        run = BACKENDS["inductor"]()(module, [given])
    for _ in range(2):
        results = run(given)
        for result, value in zip(results, wanted, strict=True):
            assert result.stride() == value.stride()
            torch.testing.assert_close(result, value)
        memories = [t.untyped_storage().data_ptr() for t in results]
        assert len(set(memories)) == 5, memories
        assert memories[3] == memories[4]
        assert memories[5] == given.data_ptr()
