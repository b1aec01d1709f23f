"""Modules of unusual kinds: one process's values and gradients under every plan, or an error that
says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks
from tests.twins import assert_same

PLANS = ("data", "zero1", "zero3", "tensor")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


class WithSlots(Inner):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mT


def parametrized() -> nn.Module:
    made = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(made, "weight", Symmetric())
    return made


def seen(module: nn.Module) -> nn.Module:
    module(torch.ones(1, 4))
    return module


RIGHT: dict[str, Any] = {
    "fx": lambda: torch.fx.symbolic_trace(Inner()),
    "slots": WithSlots,
    "parametrized": parametrized,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "lazy, seen": lambda: seen(nn.LazyLinear(4)),
    "scripted, no tensors": lambda: torch.jit.script(Gate()),
    "traced, no tensors": lambda: torch.jit.trace(Gate(), torch.ones(4, 4)),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "scripted": (lambda: torch.jit.script(Inner()), "leave torch.jit.script and torch.jit.trace"),
    "traced": (lambda: torch.jit.trace(Inner(), torch.ones(4, 4)), "leave torch.jit.script"),
    "lazy": (lambda: nn.LazyLinear(4), "takes its sizes from its first input"),
}


def built(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)).double()


@on_ranks(2)
def test_values_and_gradients_are_those_of_one_process(rank: int) -> None:
    place = Placement("cpu", range(2))
    x = torch.arange(24, dtype=torch.float64).view(6, 4).sin()
    for name, make in RIGHT.items():
        alone = built(make)
        wanted = alone(x)
        wanted.square().sum().backward()
        for plan in PLANS:
            shared = consistent.parallelize(built(make), place, plan)
            found = shared(consistent.distribute(x, place, S(0)))
            found.square().sum().backward()
            grads: Any = [p.grad for p in shared.parameters()]
            assert_same(found.full(), wanted)
            assert_same([g.full() for g in grads], [p.grad for p in alone.parameters()])
            assert len(grads) == len(list(alone.parameters())), name


@on_ranks(2)
def test_what_cannot_be_global_is_refused_under_every_plan(rank: int) -> None:
    for make, text in REFUSED.values():
        for plan in PLANS:
            with pytest.raises((TypeError, ValueError), match=text):
                consistent.parallelize(
                    nn.Sequential(nn.Linear(4, 4), make()), Placement("cpu", [0, 1]), plan
                )
