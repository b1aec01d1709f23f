"""explain() follows whole steps: forward, backward and the optimizer, and changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import Placement, S
from mirrored.transports.counting import counting
from tests.ranks import on_ranks, pool

PLANS = ("data", "zero1", "zero2", "zero3", "tensor")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        self.seen += 1  # type: ignore[operator]
        return self.body(x) * self.scale


class Trained:
    """A model, its optimizer, and a step of its training."""

    def __init__(self, plan: str) -> None:
        self.net = consistent.parallelize(Net(), Placement.all("cpu"), plan)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.x = consistent.distribute(torch.ones(6, 8), Placement.all("cpu"), S(0))

    def step(self, x: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        """All tensors that a step may change."""
        found = [*self.net.parameters(), *self.net.buffers()]
        found += [p.grad for p in self.net.parameters() if p.grad is not None]
        found += [
            x
            for values in self.optimizer.state.values()
            for x in values.values()
            if isinstance(x, torch.Tensor)
        ]
        return found


def _local(x: Any) -> torch.Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


@on_ranks(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_followed_to_its_end_and_changes_nothing(rank: int, plan: str) -> None:
    it = Trained(plan)
    for number in range(2):  # without gradients and optimizer state, and with them
        objects, before = it.state(), [_local(x) for x in it.state()]
        with counting() as sent:
            said = consistent.explain(it.step, it.x)
        assert not sent.calls and not said.stopped, said
        names = [op.name for op in said.ops]
        assert names.index("linear") < names.index("mean") < names.index("addcdiv")
        assert names.count("addcdiv") == 5
        assert all(a is b for a, b in zip(objects, it.state(), strict=True))
        assert all(torch.equal(a, _local(b)) for a, b in zip(before, objects, strict=True))
        it.step(it.x)
        assert it.net.seen.full()[0] == number + 1  # type: ignore[operator]


def _bytes(rank: int, plan: str) -> tuple[Any, int]:
    it = Trained(plan)
    said = consistent.explain(it.step, it.x)
    with consistent.report() as report:
        it.step(it.x)
    return {op.name: op.result for op in said.ops if op.name == "zeros_like"}, (
        said.nbytes - report.nbytes
    )


@pytest.mark.parametrize("plan", PLANS)
def test_bytes_are_those_of_a_report_and_state_is_in_the_layout_of_the_step(plan: str) -> None:
    (layouts, differ), _ = pool(2).run(_bytes, plan)
    assert differ == 0
    of_step = {"data": "B", "tensor": layouts["zeros_like"]}
    assert layouts["zeros_like"] == of_step.get(plan, "S(0)")


def _unused(rank: int) -> list[str]:
    it = Trained("data")

    def loss(x: Any) -> None:
        it.net.body(x).sum().backward()  # type: ignore[operator]

    it.step(it.x)
    said = consistent.explain(loss, it.x)
    return [op.name for op in said.ops if op.name == "sum of a gradient"]


def test_gradients_that_a_backward_does_not_reach_are_not_summed() -> None:
    assert len(pool(2).run(_unused)[0]) == 4  # not that of scale, which has one from before


def _in_arguments(rank: int) -> Any:
    it = Trained("zero3")
    twin = copy.deepcopy(it.net)

    def step(net: nn.Module, optimizer: Any, x: Any) -> None:
        net(x).sum().backward()
        optimizer.step()

    said = consistent.explain(step, it.net, it.optimizer, it.x)
    same = [
        torch.equal(_local(a), _local(b)) for a, b in zip(it.net.parameters(), twin.parameters())
    ]
    return said, all(same), [op.name for op in consistent.explain(it.net, it.x).ops]


def test_models_and_optimizers_may_be_arguments_or_the_function() -> None:
    said, same, names = pool(2).run(_in_arguments)[0]
    assert not said.stopped and same and said["addcdiv"].name == "addcdiv"
    assert names.count("linear") == 2 and names[-1] == "mul"


def _twice(rank: int) -> Any:
    x = consistent.distribute(torch.ones(4, 4), Placement.all("cpu"), S(0))
    return [op.name for op in consistent.explain(lambda x: (x + 1) + 1, x).ops]


def test_an_op_that_runs_twice_is_listed_twice() -> None:
    assert pool(2).run(_twice)[0] == ["add", "add"]
