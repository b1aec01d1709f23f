"""Parameters that several stages use: each stage has its own, and their gradients are summed.

```
embed.weight on stage 0   gradient a  ---->  a + b  ---->  both step alike, and stay equal
head.weight  on stage 3   gradient b  ---->  a + b
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.plans.gradients import set_raw_grad
from ..nn.same_object import abandon

Place = tuple[torch.nn.Module, str]


class Tied:
    """The groups of places that held one parameter before the model was cut."""

    def __init__(self, groups: Sequence[Sequence[Place]]) -> None:
        self._groups = [list(group) for group in groups]
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def _params(self, group: Sequence[Place]) -> list[Any]:
        return list(dict.fromkeys(owner._parameters[key] for owner, key in group))

    def begin(self) -> None:
        """Set the gradients aside: those of this step are summed."""
        for group in self._groups:
            for p in self._params(group):
                self._before[id(p)] = p.grad
                p.grad = None

    def end(self) -> None:
        """Give every parameter of a group the sum of their gradients. Every rank calls it."""
        with torch.no_grad():
            for group in self._groups:
                self._sum(self._params(group))
        self._before = {}

    def _sum(self, params: list[Any]) -> None:
        first, grads = params[0], [p.grad for p in params if p.grad is not None]
        if not grads:
            for p in params:
                p.grad = self._before[id(p)]
            return
        total: Any = None
        for g in grads:
            here = g.to_global(first.placement, first.sbp)
            total = here if total is None else total + here
        for p in params:
            layout = p.sbp if p.grad is None else p.grad.sbp
            new = total.to_global(p.placement, layout)
            before = self._before[id(p)]
            set_raw_grad(p, new if before is None else before + new.to_global(sbp=before.sbp))


def tied_places(stages: Sequence[Sequence[torch.nn.Module]]) -> list[list[Place]]:
    """The places of each parameter that modules of several stages hold."""
    found: dict[int, dict[int, list[Place]]] = {}
    for stage, modules in enumerate(stages):
        for top in modules:
            for owner in top.modules():
                for key, p in owner._parameters.items():
                    if p is not None:
                        found.setdefault(id(p), {}).setdefault(stage, []).append((owner, key))
    return [
        [place for places in by_stage.values() for place in places]
        for by_stage in found.values()
        if len(by_stage) > 1
    ]


def untie(stages: Sequence[Sequence[torch.nn.Module]]) -> None:
    """Give each stage a parameter of its own, of the same memory, where several hold one: it
    becomes global on the ranks of its stage."""
    several = {id(owner._parameters[key]) for (owner, key), *_ in tied_places(stages)}
    olds = []  # an address stands for a parameter as long as it lives
    for modules in stages:
        own: dict[int, torch.nn.Parameter] = {}
        for owner in (each for top in modules for each in top.modules()):
            for key, p in owner._parameters.items():
                if p is not None and id(p) in several:
                    olds.append(p)
                    made = own.setdefault(id(p), torch.nn.Parameter(p.detach(), p.requires_grad))
                    abandon(p, key)
                    owner._parameters[key] = made
