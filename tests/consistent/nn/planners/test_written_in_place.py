"""A found plan leaves what is written in place where it is: no write goes to a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import consistent
from consistent import B, placement
from consistent.cost_model.built_in import BUILT_IN, uniform_cost_model
from consistent.nn.plan import Plan
from consistent.nn.planners.layout_search import best_plan
from consistent.tensor.making.create import distribute
from tests.consistent.nn.planners.test_layout_search import slow
from tests.ranks import ALL, pool

pytest.importorskip("scipy")

ROWS, WIDTH = 4, 6
MACHINES = {
    "built-in": BUILT_IN["cpu"],
    "slow": slow(1e6),
    "free messages": uniform_cost_model(
        "cpu", latency=1e-9, bandwidth=1e15, overhead=0.0, memory=1e6, python=0.0, flops=1e6
    ),
}


def set_rows(x: Tensor, v: Tensor) -> None:
    x[1:3] = v[1:3]


def add_slice(x: Tensor, v: Tensor) -> None:
    x[:, 1] += v[:, 0]


# Writes into x, from v of the same sizes.
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda x, v: x.add_(v),
    "mul_": lambda x, v: x.mul_(v),
    "copy_": lambda x, v: x.copy_(v),
    "masked_fill_": lambda x, v: x.masked_fill_(v > 0, 0.5),
    "index_add_": lambda x, v: x.index_add_(0, torch.tensor([1, 0]), v[:2]),
    "clamp_": lambda x, v: x.clamp_(min=-0.5),
    "zero_": lambda x, v: x.zero_(),
    "set_rows": set_rows,
    "add_slice": add_slice,
}


class Writer(nn.Module):
    """Writes into its argument, and returns something else, a view of it or itself."""

    def __init__(self, write: str, way: str = "linear") -> None:
        super().__init__()
        self.write, self.way = write, way
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        WRITES[self.write](x, v)
        if self.way == "linear":
            return self.lin(x)
        return x[:, :WIDTH] if self.way == "view" else x


class Program(nn.Module):
    """Base of the programs below: a layer before, a writer, a layer after."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.writer = Writer(write)
        self.register_buffer("v", torch.randn(ROWS, WIDTH))
        self.register_buffer("kept", torch.randn(ROWS, WIDTH))


class Input(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.writer(x, self.v)) + x


class InputItself(Program):
    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.write](x, self.v)
        return self.last(self.first(x))


class ViewOfInput(Program):
    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.write](x.t().t(), self.v)
        return self.last(self.first(x))


class Buffer(Program):
    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.write](self.kept, self.v)
        return self.last(self.first(x) * self.kept)


class BufferByInput(Program):
    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.write](self.kept, self.first(x).detach())
        return self.last(self.first(x)) * self.kept


class BufferOfWriter(Program):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + self.writer(self.kept, self.v) * self.kept


class ViewOfBuffer(Program):
    def forward(self, x: Tensor) -> Tensor:
        WRITES[self.write](self.kept.view(ROWS // 2, 2, WIDTH).flatten(0, 1), self.v)
        return self.last(self.first(x)) * self.kept


class Activation(Program):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.writer(h, self.v)) + h


class ActivationByActivation(Program):
    def forward(self, x: Tensor) -> Tensor:
        h, v = self.first(x) * 1.0, self.last(x)
        WRITES[self.write](h, v)
        return h @ h.t() @ v


class View(Program):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1.0
        WRITES[self.write](h.view(ROWS, 2, WIDTH // 2).transpose(0, 1), self._turned())
        return self.last(h)

    def _turned(self) -> Tensor:
        return self.v.view(ROWS, 2, WIDTH // 2).transpose(0, 1).contiguous()


class ViewOfWriter(Program):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1.0
        return self.last(h + self.writer(h.view(ROWS, WIDTH), self.v))


class Returned(Program):
    """The writer returns what it has written, which is then written again outside."""

    def __init__(self, write: str) -> None:
        super().__init__(write)
        self.writer = Writer(write, "self")

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1.0
        y = self.writer(h, self.v)
        WRITES[self.write](y, self.kept)
        return self.last(y) + h


class ReturnedView(Returned):
    def __init__(self, write: str) -> None:
        super().__init__(write)
        self.writer = Writer(write, "view")


PROGRAMS = {made.__name__: made for made in Program.__subclasses__() + Returned.__subclasses__()}


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def case(program: str, write: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = PROGRAMS[program](write).double()
    return model, torch.randn(ROWS, WIDTH, dtype=torch.float64)


def run(rank: int, program: str, plans: dict[str, Plan], grid: list) -> list[str]:
    """The writes under whose plan something differs from plain torch."""
    return [text for write, plan in plans.items() if (text := differs(program, write, plan, grid))]


def differs(program: str, write: str, plan: Plan, grid: list) -> str:
    model, x = case(program, write)
    twin, expected_x = copy.deepcopy(model), x.clone()
    expected = step(twin, expected_x)
    where = placement("cpu", ranks=grid)
    consistent.parallelize(model, where, plan)
    given = distribute(x, where, (B,) * where.ndim)
    try:
        pairs = {"loss": (step(model, given), expected), "input": (given, expected_x)}
    except Exception as error:
        return f"{write}: {type(error).__name__}: {str(error)[:200]}"
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        pairs[f"gradient of {name}"] = p.grad, q.grad
    for (name, p), q in zip(model.named_buffers(), twin.buffers(), strict=True):
        pairs[name] = p, q
    wrong = [name for name, (a, b) in pairs.items() if not same(a, b)]
    return f"{write}: {', '.join(wrong)}" if wrong else ""


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return (a is None or not a.full().any()) and (b is None or not b.any())
    return torch.allclose(a.full().detach(), b.detach())


GRID = [[0, 1], [2, 3]]


# Where messages are free, a plan boxes wherever it may.
CASES = [("free messages", [0, 1]), ("free messages", GRID)]


def writes_of(program: str, grid: list) -> list[str]:
    """Programs take turns: three writes for each program, and each in four programs or more. On two
    axes, which take four times as long, two for each program, others than on one."""
    turn, every = list(PROGRAMS).index(program), (3, 4)[grid is GRID]
    shift = grid is GRID
    return [w for k, w in enumerate(WRITES) if ALL or k % every == (turn + shift) % every]


@pytest.mark.parametrize(
    "machine, grid", CASES + ([("built-in", [0, 1]), ("slow", [0, 1])] if ALL else [])
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_program_writes_in_place_is_what_it_writes_on_one_device(program, machine, grid):
    where = placement("cpu", ranks=grid)
    plans = {}
    for write in writes_of(program, grid):
        model, x = case(program, write)
        plans[write] = best_plan(step, where, (model, x), machine=MACHINES[machine])
    for found in pool(where.size).run(run, program, plans, grid):
        assert not found, "\n".join(found)
