"""Calls of modules in the log of a simulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import consistent
from consistent.auto.simulation.calls import Blank
from consistent.auto.simulation.log import ModuleEntered, ModuleLeft, SimulatedOp


class Outer(nn.Module):
    """Calls the inner module twice, and writes into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(300, 200)

    def forward(self, x: Tensor, cache: list[Any], scale: Tensor) -> Tensor:
        cache.append(x)
        return self.inner(self.inner(x)[:, :1].expand(-1, 300)) * scale


def _logged(*names: str) -> tuple[list[Any], list[Any]]:
    """The events of a call of ``Outer`` in which calls of these modules are logged, and what it
    wrote."""
    cache: list[Any] = []
    with consistent.simulate(ranks=1, machine="a100-8") as sim:
        model = Outer()
        modules = dict(model.named_modules())
        x, scale = torch.randn(100, 300), torch.tensor(2.0)
        begin = len(sim.events)
        with sim.calls_of((name, modules[name]) for name in names):
            model(x, cache, scale=scale)
        model(x, cache, scale=scale)  # outside the block no call is logged
        events = sim.events[begin:]
    return events, cache


def _said(events: list[Any]) -> list[str]:
    """Names of calls and of products, in order."""
    kinds = {ModuleEntered: "enter {.name}", ModuleLeft: "leave {.name}"}
    found = [
        kinds[type(e)].format(e) if type(e) in kinds else "product"
        for e in events
        if type(e) in kinds or (isinstance(e, SimulatedOp) and e.work.kind == "matmul")
    ]
    return found


def test_calls_lie_around_their_ops() -> None:
    inner = ["enter inner", "product", "leave inner"]
    assert _said(_logged("inner")[0]) == [*inner, *inner, "product", "product"]
    both = _said(_logged("", "inner")[0])
    assert both == ["enter ", *inner, *inner, "leave ", "product", "product"]
    assert _said(_logged()[0]) == ["product"] * 4


def test_arguments_are_those_at_the_begin_of_the_call() -> None:
    events, cache = _logged("")
    (entered,) = (e for e in events if isinstance(e, ModuleEntered))
    args, kwargs = entered.arguments
    assert args == (Blank((100, 300), torch.float32, False), []) and len(cache) == 2
    assert kwargs["scale"].item() == 2  # a small tensor has its value
    (left,) = (e for e in events if isinstance(e, ModuleLeft))
    assert left.out == [Blank((100, 200), torch.float32, True)]
