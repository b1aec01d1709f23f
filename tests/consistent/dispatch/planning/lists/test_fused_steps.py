"""The fused optimizer steps, whatever lies how: parameters, gradients, state and factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent import B, P, S
from tests.ranks import ALL, pool
from tests.twins import GRIDS, Laid, compare, randn

STEPS = [n for n in dir(torch) if n.startswith("_fused_") and n.endswith("_")]
SHAPES = [(4, 3), (5,), (1,)]
LISTS = {"_fused_sgd_": 3, "_fused_adagrad_": 3, "_fused_adam_": 5, "_fused_adamw_": 5}
SCHEMA_NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "momentum": 0.9}
WAYS: dict[str, list[Any]] = {
    "B": [(B, B)],
    "S": [(S(0), S(0))],
    "P": [(P, B)],
    "mixed": [(S(0), B), (B, P), (B, S(0))],
    "plain": ["plain"],
}


def lay(at: Laid, x: torch.Tensor, layout: Any) -> Any:
    return x.clone() if layout == "plain" else at(x, *layout)


def lists_of(at: Laid, name: str, ways: list[str]) -> list[list[Any]]:
    made = []
    for number, way in enumerate(ways):
        layouts = WAYS[way]
        made.append(
            [
                lay(at, randn(*shape, seed=10 * number + i).abs() + 0.1, layouts[i % len(layouts)])
                for i, shape in enumerate(SHAPES)
            ]
        )
    return made


def arguments_of(name: str) -> dict[str, Any]:
    """The keywords of the schema."""
    schema = getattr(torch.ops.aten, name).default._schema
    named = [a for a in schema.arguments if a.kwarg_only and not a.has_default_value()]
    flags = {a.name: False for a in named if str(a.real_type) == "bool"}
    numbers = {a.name: SCHEMA_NUMBERS.get(a.name, 0.01) for a in named if a.name not in flags}
    return numbers | flags | ({"amsgrad": True} if "amsgrad" in flags else {})


def ways_of(name: str) -> list[list[str]]:
    """The ways of the lists of a step: all alike, and each in turn in another way."""
    count = LISTS[name]
    ways = [[way] * count for way in WAYS if way != "plain"]
    for first in ("B", "S"):
        for i in range(count):
            ways += [[first] * i + [way] + [first] * (count - i - 1) for way in WAYS]
    return [list(each) for each in dict.fromkeys(map(tuple, ways))]


def steps(at: Laid, name: str, axes: int, most: int | None = None, **more: Any) -> list[Any]:
    """On as many ``axes`` as the grid has, those of the first ``most`` ways."""
    found = []
    for each in ways_of(name)[:most]:
        lists = lists_of(at, name, each)
        counts = [] if name == "_fused_sgd_" else [[torch.tensor(2.0) for _ in SHAPES]]
        getattr(torch, name)(*lists, *counts, **arguments_of(name) | more)
        found.append((each, lists))
    return found


def factors(at: Laid, name: str, axes: int) -> list[Any]:
    """Learning rates, scales and the mark of an overflow: plain, B and P; read by every rank."""
    found = []
    for layout in ("plain", (B, B), (P, B), *([(B, P)] if axes > 1 else [])):
        for inf in (0.0, 1.0):
            # A sum of random float32 addends is 4 to seven digits only.
            scale = lay(at, torch.tensor(4.0), "plain" if layout == "plain" else (B, B))
            rate = lay(at, torch.tensor(0.1).double(), layout)
            mark = lay(at, torch.tensor(inf), layout)
            found.append(steps(at, name, axes, 8, lr=rate, grad_scale=scale, found_inf=mark))
    return found


@pytest.mark.parametrize("world", [3, 4] if ALL else [3])
@pytest.mark.parametrize("case", [steps, factors])
@pytest.mark.parametrize("name", STEPS)
def test_equals_plain_torch(name: str, case: Any, world: int) -> None:
    pool(world).run(compare, case, GRIDS[world], name, 2 if world == 4 else 1)
