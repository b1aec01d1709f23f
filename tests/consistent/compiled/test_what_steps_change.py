"""Steps that change what they were recorded with, or between whose calls it is changed: gradients,
rates, random states, modules, globals, containers. Programs give the values that the steps give.

Each case is given ``c``, which compiles a step or leaves it as it is, and gives what to compare.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import B, Placement, S
from mirrored.transports.default import current
from tests.consistent.compiled.steps import _flat, _values
from tests.ranks import on_ranks
from tests.twins import randn

Case = Callable[[Callable[..., Any]], list[Any]]
ALONE: list[Case] = []
SEVERAL: list[Case] = []


def alone(case: Case) -> Case:
    ALONE.append(case)
    return case


def several(case: Case) -> Case:
    SEVERAL.append(case)
    return case


def check(case: Case) -> None:
    """The same values, and the same count of random numbers, with and without programs."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(3)
        random.seed(3)

        def c(step: Any, compiles: bool = compiles) -> Any:
            return consistent.compile(step, backend="ops") if compiles else step

        found.append([_values(x) for x in case(c)] + [torch.get_rng_state()])
    for eager, program in zip(*map(_flat, found), strict=True):
        torch.testing.assert_close(program, eager, rtol=1e-7, atol=1e-8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.__name__)
def test_a_program_gives_the_values_of_its_step(case: Case) -> None:
    check(case)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.__name__)
@on_ranks(2)
def test_a_program_gives_the_values_of_its_step_on_several_ranks(rank: int, case: Case) -> None:
    check(case)


def split(i: int, *sizes: int) -> Any:
    return consistent.distribute(randn(*(sizes or (4, 3)), seed=i), Placement.all("cpu"), S(0))


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def trained(
    c: Any, between: Any, optimizer: Any = torch.optim.AdamW, inside: Any = lambda m, o: None
) -> list[Any]:
    """Seven steps of training, with ``between(i, model, optimizer)`` before each."""
    m = linear()
    o = optimizer(m.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        o.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        inside(m, o)
        o.step()
        return loss

    s, made = c(step), []
    for i in range(7):
        between(i, m, o)
        made += [s(randn(4, 3, seed=i)), _values(m), _values(o)]
    return made


def called(c: Any, step: Any, between: Any = lambda i: None, calls: int = 6) -> list[Any]:
    """The results of a step on plain tensors, with ``between(i)`` before each."""
    s, made = c(step), []
    for i in range(calls):
        between(i)
        made.append(_values(s(randn(4, 3, seed=i))))
    return made


# -- gradients, parameters, optimizers -------------------------------------------------------------


@alone
def gradients_that_are_added_to(c: Any) -> list[Any]:
    m = linear()
    o = torch.optim.SGD(m.parameters(), lr=0.1)

    def step(x: Any, last: bool) -> Any:
        loss = m(x).square().mean()
        loss.backward()
        if last:
            o.step()
            o.zero_grad()
        return loss

    s, made = c(step), []
    for i in range(12):
        made += [s(randn(4, 3, seed=i), i % 4 == 3), _values(m)]
    return made


@alone
def gradients_that_are_new(c: Any) -> list[Any]:
    m = linear()
    o = torch.optim.AdamW(m.parameters(), lr=0.1)
    s, made = c(lambda: o.step()), []
    for i in range(6):
        m.weight.grad, m.bias.grad = randn(2, 3, seed=i), randn(2, seed=i) if i >= 3 else None
        s()
        made.append(_values(m))
    return made


@alone
def frozen_between(c: Any) -> list[Any]:
    return trained(c, lambda i, m, o: m.bias.requires_grad_(i not in (3, 4)), torch.optim.SGD)


@alone
def thawed_between(c: Any) -> list[Any]:
    return trained(c, lambda i, m, o: m.bias.requires_grad_(i >= 3), torch.optim.SGD)


@alone
def optimizer_state_loaded(c: Any) -> list[Any]:
    saved: list[Any] = []

    def between(i: int, m: Any, o: Any) -> None:
        if i == 2:
            saved[:] = copy.deepcopy((m.state_dict(), o.state_dict()))
        if i == 5:
            m.load_state_dict(saved[0])
            o.load_state_dict(saved[1])

    return trained(c, between)


@alone
def rate_set_after_a_load(c: Any) -> list[Any]:
    def between(i: int, m: Any, o: Any) -> None:
        if i == 4:
            o.load_state_dict(o.state_dict())
        if i == 5:
            o.param_groups[0]["lr"] = 0.5

    return trained(c, between)


@alone
def rate_set_inside(c: Any) -> list[Any]:
    def inside(m: Any, o: Any) -> None:
        o.param_groups[0]["lr"] *= 0.8

    return trained(c, lambda i, m, o: None, inside=inside)


@alone
def rate_set_inside_sgd(c: Any) -> list[Any]:
    def inside(m: Any, o: Any) -> None:
        o.param_groups[0]["lr"] *= 0.8

    return trained(c, lambda i, m, o: None, torch.optim.SGD, inside)


@alone
def rate_that_is_read(c: Any) -> list[Any]:
    def inside(m: Any, o: Any) -> None:
        for p in m.parameters():
            p.grad.mul_(o.param_groups[0]["lr"])

    return trained(
        c,
        lambda i, m, o: o.param_groups[0].update(lr=0.1 / (i + 1)),
        torch.optim.SGD,
        inside,
    )


@alone
def rate_that_is_read_before_a_schedule_in_the_step(c: Any) -> list[Any]:
    o = torch.optim.SGD(linear().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)

    def step(x: Any) -> Any:
        y = x * o.param_groups[0]["lr"]
        schedule.step()
        return y

    return called(c, step)


def schedule_read_by(read: Callable[[Any], float], inside: bool) -> Case:
    """The step asks for what a schedule counts; the step, or others, step it."""

    def case(c: Any) -> list[Any]:
        o = torch.optim.SGD(linear().parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)

        def step(x: Any) -> Any:
            if inside:
                schedule.step()
            return x * read(schedule)

        def between(i: int) -> None:
            if not inside:
                schedule.step()

        return called(c, step, between)

    return case


SCHEDULES: dict[str, Callable[[Any], float]] = {
    "by_its_method": lambda s: s.get_last_lr()[0],
    "by_its_count": lambda s: float(s.last_epoch),
    "by_its_dict": lambda s: vars(s)["last_epoch"],
    "by_its_state": lambda s: s.state_dict()["last_epoch"],
    "by_getattr": lambda s: getattr(s, "_last_lr")[0],  # noqa: B009
    "of_its_groups": lambda s: s.optimizer.param_groups[0]["lr"],
    "in_a_copy": lambda s: copy.copy(s).last_epoch,
}
for _name, _read in SCHEDULES.items():
    for _inside in (False, True):
        case = alone(schedule_read_by(_read, _inside))
        case.__name__ = f"schedule_that_is_read_{_name}_{'inside' if _inside else 'outside'}"


def momentum_read_by(read: Callable[[Any], float]) -> Case:
    """The step reads a number of a group; others than the step change it."""

    def case(c: Any) -> list[Any]:
        def inside(m: Any, o: Any) -> None:
            for p in m.parameters():
                p.grad.mul_(read(o.param_groups[0]))

        return trained(
            c,
            lambda i, m, o: o.param_groups[0].update(momentum=0.9 / (i + 1)),
            lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
            inside,
        )

    return case


READS: dict[str, Callable[[Any], float]] = {
    "at_a_key": lambda g: g["momentum"],
    "get": lambda g: g.get("momentum"),
    "items": lambda g: next(x for key, x in g.items() if key == "momentum"),
    "values": lambda g: sum(x for x in g.values() if type(x) is float),
    "copy": lambda g: g.copy()["momentum"],
    "dict": lambda g: dict(g)["momentum"],
    "unpacked": lambda g: {**g, "more": 1}["momentum"],
}
for _name, _read in READS.items():
    alone(momentum_read_by(_read)).__name__ = f"momentum_that_is_read_{_name}"


@alone
def momentum_set_inside(c: Any) -> list[Any]:
    def inside(m: Any, o: Any) -> None:
        o.param_groups[0]["momentum"] *= 0.8

    def optimizer(p: Any, lr: float) -> Any:
        return torch.optim.SGD(p, lr=lr, momentum=0.9)

    return trained(c, lambda i, m, o: None, optimizer, inside)


@alone
def betas_that_change_and_go_back(c: Any) -> list[Any]:
    def between(i: int, m: Any, o: Any) -> None:
        o.param_groups[0]["betas"] = (0.5, 0.9) if i in (3, 5) else (0.9, 0.99)

    return trained(c, between)


@alone
def momentum_that_begins(c: Any) -> list[Any]:
    def between(i: int, m: Any, o: Any) -> None:
        o.param_groups[0]["momentum"] = 0.9 if i >= 3 else 0.0

    return trained(c, between, torch.optim.SGD)


@alone
def schedule_between_two_steps(c: Any) -> list[Any]:
    m = linear()
    o = torch.optim.AdamW(m.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)

    def step(x: Any) -> Any:
        for _ in range(2):
            o.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            o.step()
            schedule.step()
        return loss

    return [(x, _values(m)) for x in called(c, step)]


@alone
def rate_of_a_schedule(c: Any) -> list[Any]:
    o = torch.optim.SGD(linear().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    return called(c, lambda x: x * schedule.get_last_lr()[0], lambda i: schedule.step())


@alone
def data_of_a_parameter_set(c: Any) -> list[Any]:
    m = linear()

    def step(x: Any) -> Any:
        out = m(x).detach()
        for p in m.parameters():
            p.data = p.data * 0.9
        return out

    return called(c, step)


@alone
def data_of_a_parameter_set_to_another_size(c: Any) -> list[Any]:
    w = nn.Parameter(randn(3))

    def between(i: int) -> None:
        if i == 3:
            w.data = randn(1)

    return called(c, lambda x: (x * w).detach() * w.numel(), between)


@alone
def parameters_replaced_by_a_load(c: Any) -> list[Any]:
    m = linear()

    def step(x: Any) -> Any:
        loss = m(x).square().mean()
        loss.backward()
        return loss

    s, made = c(step), []
    for i in range(6):
        if i == 3:
            m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)
        m.zero_grad()
        s(randn(4, 3, seed=i))
        made.append([p.grad is not None and _values(p.grad) for p in m.parameters()])
    return made


@alone
def gradient_of_an_argument(c: Any) -> list[Any]:
    s, made = c(lambda x: x.square().sum().backward()), []
    for i in range(5):
        x = randn(4, 3, seed=i).requires_grad_()
        s(x)
        made.append(x.grad is not None and _values(x.grad))
    return made


@alone
def hook_of_a_tensor(c: Any) -> list[Any]:
    def between(i: int, m: Any, o: Any) -> None:
        if i == 3:
            m.weight.register_hook(lambda g: g * 0)

    return trained(c, between, torch.optim.SGD)


# -- values that Python reads ----------------------------------------------------------------------


@alone
def a_sum_that_began_as_zeros(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        total = torch.zeros((), dtype=x.dtype)
        total += x.sum()
        return x * 2 if total.item() > 0 else x

    return called(c, step)


@alone
def a_draw_into_memory(c: Any) -> list[Any]:
    return called(c, lambda x: x * torch.empty(()).uniform_().item())


@alone
def where_to_split(c: Any) -> list[Any]:
    s = c(lambda x, at: [part.sum() for part in torch.tensor_split(x, at)])
    return [s(randn(6, 2, seed=i), torch.tensor([1 + i % 3, 4])) for i in range(6)]


# -- random numbers --------------------------------------------------------------------------------


@alone
def dropout_in_a_checkpoint(c: Any) -> list[Any]:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).double()

    def step(x: Any) -> Any:
        m.zero_grad()
        loss = checkpoint(m, x, use_reentrant=False).square().mean()
        loss.backward()
        return loss, [p.grad for p in m.parameters()]

    return called(c, step)


@alone
def a_seed_inside(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        torch.manual_seed(5)
        return x + torch.rand_like(x)

    return called(c, step)


@alone
def a_fork_inside(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        with torch.random.fork_rng():
            x = x + torch.rand_like(x)
        return x + torch.rand_like(x)

    return called(c, step)


@alone
def a_generator_of_torch(c: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return called(c, lambda x: x + torch.rand(3, generator=generator))


@alone
def random_numbers_of_python(c: Any) -> list[Any]:
    return called(c, lambda x: x * random.random())


# -- what only writes ------------------------------------------------------------------------------


@alone
def a_norm_that_only_learns(c: Any) -> list[Any]:
    m = nn.BatchNorm1d(3).double()

    def step(x: Any) -> None:
        with torch.no_grad():
            m(x)

    s, made = c(step), []
    for i in range(5):
        s(randn(4, 3, seed=i))
        made.append(_values(m))
    return made


@alone
def a_deque(c: Any) -> list[Any]:
    kept: deque = deque(maxlen=9)

    def step(x: Any) -> Any:
        kept.append(x.sum())
        return x * 2

    return [called(c, step), len(kept)]


# -- what can be reached ---------------------------------------------------------------------------

FACTOR = 1.0


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._factor = 1.0
        self._calls = 0

    def forward(self, x: Any) -> Any:
        self._calls += 1
        return x * self._factor * self._calls


class Scaled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * FACTOR


class Settings:
    factor = 1.0


class Slotted:
    __slots__ = ("factor",)


def set_factor(i: int) -> None:
    global FACTOR
    FACTOR = 1.0 + i // 3


@alone
def private_numbers_of_a_module(c: Any) -> list[Any]:
    m = Plain()
    return called(c, lambda x: m(x), lambda i: setattr(m, "_factor", 1.0 + i // 3))


@alone
def a_global_of_forward(c: Any) -> list[Any]:
    m = Scaled()
    return called(c, lambda x: m(x), set_factor)


@alone
def a_global_of_a_graph(c: Any) -> list[Any]:
    class Once(consistent.nn.Graph):
        def build(self, x: Any) -> Any:
            return x * FACTOR

    graph = Once()
    if not isinstance(c(lambda: 1), types.FunctionType):
        graph.config.enable_compile(backend="ops")
    return called(lambda step: step, lambda x: graph(x), set_factor)


@alone
def class_attributes(c: Any) -> list[Any]:
    found = called(c, lambda x: x * Settings.factor, lambda i: setattr(Settings, "factor", i // 3))
    own = Settings()
    return [found, called(c, lambda x: x * own.factor, lambda i: setattr(Settings, "factor", i))]


@alone
def slots_of_objects(c: Any) -> list[Any]:
    own = Slotted()
    return called(c, lambda x: x * own.factor, lambda i: setattr(own, "factor", 1.0 + i // 3))


@alone
def another_module(c: Any) -> list[Any]:
    own: Any = types.ModuleType("own")
    return called(c, lambda x: x * own.factor, lambda i: setattr(own, "factor", 1.0 + i // 3))


@alone
def builtin_functions_arrays_and_sets(c: Any) -> list[Any]:
    act: Any = torch.relu
    array, members = np.ones(3), {1}

    def between(i: int) -> None:
        nonlocal act
        act = torch.relu if i < 3 else torch.tanh
        array[:] = i // 2
        members.add(i // 2)

    return [
        called(c, lambda x: act(x), between),
        called(c, lambda x: x * torch.tensor(array), between),
        called(c, lambda x: x * len(members), lambda i: members.add(10 + i // 2)),
    ]


@alone
def counters(c: Any) -> list[Any]:
    count = itertools.count()
    return called(c, lambda x: x * next(count))


@alone
def modules_and_hooks_that_are_added(c: Any) -> list[Any]:
    m = nn.Sequential(nn.Tanh())

    def between(i: int) -> None:
        if i == 3:
            m.append(nn.Sigmoid())
        if i == 5:
            m.register_forward_hook(lambda module, given, out: out * 2)

    return called(c, lambda x: m(x), between, 8)


@alone
def defaults(c: Any) -> list[Any]:
    def step(x: Any, *, factors: Any = [1.0]) -> Any:  # noqa: B006
        return x * factors[0]

    kept: Any = step.__kwdefaults__
    return called(c, step, lambda i: kept["factors"].__setitem__(0, float(i // 3)))


@alone
def containers_that_are_equal(c: Any) -> list[Any]:
    kept = [torch.zeros(1, dtype=torch.float64)]

    def between(i: int) -> None:
        nonlocal kept
        if i % 2:
            kept = [kept[0].clone()]

    def step(x: Any) -> Any:
        kept[0].add_(x.sum())
        return x * kept[0]

    found = called(c, step, between, 8)
    given: Any = {"w": torch.ones(3)}

    def other(i: int) -> None:
        nonlocal given
        given = {"w": torch.ones(3) * i}

    return [found, called(c, lambda x: x * given["w"], other)]


# -- arguments and results -------------------------------------------------------------------------


@alone
def arguments_in_one_memory(c: Any) -> list[Any]:
    s, d = c(lambda x, y: x - 2 * y), randn(8, 3)
    return [s(d[:4], d[:4]) for _ in range(3)] + [s(d[:4], d[4:]) for _ in range(2)]


@alone
def an_argument_that_is_a_parameter(c: Any) -> list[Any]:
    m = linear()
    s = c(lambda w, x: (F.linear(x, w) - F.linear(x, m.weight)).detach())
    given = [m.weight] * 3 + [nn.Parameter(randn(2, 3, seed=i)) for i in range(2)]
    return [s(w, randn(4, 3)) for w in given]


@alone
def weights_that_are_tied_no_more(c: Any) -> list[Any]:
    a, b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    b.weight = a.weight

    def between(i: int) -> None:
        if i == 3:
            b.weight = nn.Parameter(torch.eye(3, dtype=torch.float64))

    return called(c, lambda x: b(a(x)).detach(), between)


@alone
def arguments_without_a_hash(c: Any) -> list[Any]:
    s = c(lambda x, members: x * sum(members))
    t = c(lambda x, array: x * torch.tensor(array))
    return [s(randn(3), {i, i + 1}) for i in range(8)] + [
        t(randn(3), np.full(3, float(i))) for i in range(8)
    ]


@alone
def results_in_objects(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        return types.SimpleNamespace(sum=x.sum())

    s = c(step)
    return [s(randn(3, seed=i)).sum for i in range(5)]


@alone
def as_a_method(c: Any) -> list[Any]:
    class Trainer:
        @c
        def step(self, x: Any) -> Any:
            return x * 2

    trainer = Trainer()
    return [trainer.step(randn(3, seed=i)) for i in range(4)]


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]


@functools.lru_cache
def kept_elsewhere() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)


def optimizers_after_what_has_no_program(c: Any, hidden: Callable[[], torch.Tensor]) -> list[Any]:
    """They ask torch.compiler.is_compiling(), and compute in float32 from the count of steps if it
    is true."""
    found = []
    for kind in OPTIMIZERS:
        model = nn.Linear(4, 4, bias=False).double()  # Muon takes matrices
        optimizer = kind(model.parameters(), lr=0.01)

        def step(x: Any, scale: bool, model=model, optimizer=optimizer) -> Any:
            optimizer.zero_grad()
            y = model(x)
            loss = (y * hidden() if scale else y).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        s = c(step)
        x = torch.randn(3, 4, dtype=torch.float64)
        losses = [s(x, scale) for scale in (False, False, True, True, False, True)]
        found.append([*losses, next(model.parameters())])
    return found


@alone
def optimizers_after_an_op_of_which_there_is_no_program(c: Any) -> list[Any]:
    kept_elsewhere()
    return optimizers_after_what_has_no_program(c, kept_elsewhere)


@alone
def optimizers_of_a_step_that_is_refused_at_its_begin(c: Any) -> list[Any]:
    hidden = itertools.repeat(kept_elsewhere())
    return optimizers_after_what_has_no_program(c, lambda: next(hidden))


# -- several ranks ---------------------------------------------------------------------------------


@several
def sums_that_are_returned_and_added(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        a, b, d = ((x * k).sum(0).to_global(sbp=B) for k in (1, 2, 3))
        total = a + b
        return total, total + d

    s = c(step)
    return [s(split(i)) for i in range(5)]


@several
def reductions_that_end_in_another_order(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        a, b = x * 1, x * 2
        first = current().all_reduce_async(a, (0, 1))
        second = current().all_reduce_async(b, (0, 1))
        second.wait()
        first.wait()
        return a, b

    s = c(step)
    return [s(randn(3, seed=i)) for i in range(5)]


@several
def an_argument_in_the_memory_of_a_buffer(c: Any) -> list[Any]:
    kept = split(0) * 1

    def step(x: Any) -> Any:
        first = torch.tanh(kept.to_global(sbp=B))
        x.add_(1)
        return first, torch.tanh(kept.to_global(sbp=B))

    s = c(step)
    return [_values(s(split(i) * 1)) for i in range(3)] + [_values(s(kept)) for _ in range(3)]


@several
def a_plain_collective(c: Any) -> list[Any]:
    def step(x: Any) -> Any:
        torch.distributed.barrier()
        return x.sum(0).to_global(sbp=B)

    s = c(step)
    return [s(split(i)) for i in range(4)]


@several
def what_cannot_be_found_at_a_message(c: Any) -> list[Any]:
    own: Any = types.ModuleType("own")
    own.x = torch.ones(3)
    s = c(lambda x: x * current().all_reduce(own.x, (0, 1)).sum())
    return [s(split(i)) for i in range(4)]


@on_ranks(2)
def test_a_rank_that_counts_does_not_record_for_ever(rank: int) -> None:
    log = {"calls": 0}

    def step(x: Any) -> Any:
        if rank == 0:
            log["calls"] += 1
        return x.sum(0).to_global(sbp=B)

    compiled = consistent.compile(step, backend="ops")
    with pytest.warns(UserWarning, match="not as a program"):
        for i in range(12):
            compiled(split(i))
    assert len(compiled.programs) <= 3, compiled.show()
