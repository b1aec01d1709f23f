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


@pytest.mark.filterwarnings("error::UserWarning")
def test_code_that_names_the_class_still_becomes_one_graph() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, consistent.GlobalTensor):
            return x
        return x * 2 if type(x) in [torch.Tensor, consistent.GlobalTensor] else x

    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.ones(2)
    assert torch.equal(torch.compile(asks, fullgraph=True, backend=keep)(x), x * 2)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_plain_optimizer_is_compiled_after_the_library_was_used() -> None:
    consistent.ones(2, placement=Placement("cpu", [0]), sbp=S(0))
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.Adadelta([weight], lr=1.0)
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(optimizer.step, backend=keep)()
    assert graphs and not torch.equal(weight, torch.ones(2))
