"""``torch.compile(fullgraph=True)`` of code that meets global tensors raises in our words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fullgraph_raises_an_error_that_names_consistent_compile() -> None:
    place = Placement("cpu", [0])
    x = consistent.distribute(torch.rand(4, 4), place, S(0))
    model = consistent.parallelize(nn.Linear(4, 4), place, "data")
    model(torch.ones(2, 4)).sum().backward()
    params: Any = list(model.parameters())

    def update(group: list[Any]) -> None:
        for p in group:
            p.data.add_(p.grad, alpha=-0.1)

    cases: dict[str, tuple[Callable[..., Any], tuple]] = {
        "an argument": (lambda t: t * 2 + 1, (x,)),
        "from around it": (lambda: x * 2, ()),
        "in a generator": (lambda ps: sum(p.square().sum() for p in ps), (params,)),
        "an update": (update, (params,)),
        "a list op": (torch._foreach_mul, (params, 2.0)),
        "a module": (model, (torch.ones(2, 4),)),
    }
    for name, (function, given) in cases.items():
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        with pytest.raises(RuntimeError, match=r"(?s)fullgraph=True\).*consistent\.compile"):
            compiled(*given)
        torch._dynamo.reset()
        loose = torch.compile(function, backend="eager")
        if name != "a list op":
            loose(*given)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_tensors_still_become_one_graph() -> None:
    compiled = torch.compile(lambda x: x * 2 + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
