"""A model of many small parameters: one process's values, and a cost that grows with their number,
not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import consistent
from consistent import Placement, S
from consistent.nn.planners.roles import find_linear_layers, find_pairs
from tests.ranks import ALL, on_ranks, simulate

COUNT = 5000 if ALL else 100  # layers, of two parameters each


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def trained(net: nn.Module, x: Tensor, compiled: bool) -> list[float]:
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        adam.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        return loss

    call = consistent.compile(step, backend="ops") if compiled else step
    return [call(x).item() for _ in range(3)]


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor", "compile"])
@on_ranks(2, timeout=900)
def test_many_parameters_train_as_in_one_process(rank: int, plan: str) -> None:
    count = (COUNT // 10 if ALL else 20) if plan == "compile" else COUNT
    x = torch.randn(8, 4, dtype=torch.float64)
    torch.manual_seed(0)
    plain = Many(count).double()
    torch.manual_seed(0)
    p = Placement("cpu", [0, 1])
    used = "zero3" if plan == "compile" else plan
    net = consistent.parallelize(Many(count).double(), p, plan=used)
    wanted = trained(plain, x, False)
    found = trained(net, consistent.distribute(x, p, S(0)), plan == "compile")
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


# ---- cost, in bytecodes, which no other work on the machine changes ------------------------------


def bytecodes(call: Callable[[], object]) -> int:
    """How many this thread executes in a call."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def grows_linearly(counts: list[int]) -> bool:
    """Of something, and of four times as much: 16 would be quadratic."""
    return counts[1] < 7 * counts[0]


def chain(count: int, *widths: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*widths[k * len(widths) // count]) for k in range(count)))


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "a list": Many,
    "alike": lambda n: chain(n, (4, 4)),
    "no pair": lambda n: chain(n, (4, 5)),
    "a funnel": lambda n: chain(n, (4, 16), (16, 4)),
    "parts": lambda n: nn.Sequential(
        *(chain(2, (4, 16), (7, 7)) for _ in range(n)), chain(n, (16, 4))
    ),
    "attention": lambda n: nn.ModuleDict(
        {str(k): nn.ModuleDict({x: nn.Linear(4, 4) for x in "qkvo"}) for k in range(n)}
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_pairs_of_layers_are_found_in_a_time_that_grows_with_their_number(name: str) -> None:
    made = [LAYERS[name](n) for n in (50, 200)]
    assert grows_linearly(
        [bytecodes(lambda m=m: find_pairs(m, find_linear_layers(m), 2)) for m in made]
    )


OPS: dict[str, Callable[[list[Any]], object]] = {
    "cat": torch.cat,
    "stack": torch.stack,
    "norms": lambda xs: torch.nn.utils.get_total_norm(xs),
    "hstack": torch.hstack,
    "split": lambda xs: torch.split(xs[0].repeat(len(xs)), 4),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_of_many_operands_are_planned_in_a_time_that_grows_with_their_number(name: str) -> None:
    def counted(rank: int) -> list[int]:
        p = Placement("cpu", [0, 1])
        given = [[consistent.distribute(torch.ones(4), p, S(0))] * n for n in (10, 40, 160)]
        return [bytecodes(lambda xs=xs: OPS[name](xs)) for xs in given][1:]

    for counts in simulate(counted, 2):
        assert grows_linearly(counts)
