"""Steps of every kind as programs, on 1 to 4 ranks: values, gradients and state are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import consistent
from consistent import B, P, Placement, S
from tests.consistent.compiled.steps import Made, beside
from tests.ranks import ALL, on_ranks, pool
from tests.twins import randn

CALLS = 5


class Net(nn.Module):
    """An embedding, dropout, a norm with buffers, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 6, bias=False)
        self.drop = nn.Dropout(0.25)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 11)
        self.last.weight = self.table.weight

    def forward(self, x: Any) -> Any:
        h = self.drop(torch.tanh(self.first(self.table(x))))
        h = self.norm(torch.relu(self.first(h)).transpose(1, 2)).transpose(1, 2)
        return self.last(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches(rows: int = 6, layout: Any = None) -> list[tuple]:
    made = []
    for i in range(CALLS):
        rng = torch.Generator().manual_seed(i)
        x, y = (torch.randint(11, (rows, 3), generator=rng) for _ in range(2))
        if layout is not None:
            x, y = (consistent.distribute(t, *layout) for t in (x, y))
        made.append((x, y))
    return made


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW, rate in a tensor": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01, dtype=torch.float64), capturable=False
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.01),
}


def trained(plan: Any, optimizer: str, **how: Any) -> Any:
    """A training step of Net."""

    def make() -> Any:
        model = net()
        if plan is not None:
            consistent.parallelize(model, Placement.all("cpu"), plan)
        optim = OPTIMIZERS[optimizer](list(model.parameters()))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.7)

        def step(x: Any, y: Any) -> Any:
            optim.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
            loss.backward()
            if how.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optim.step()
            if how.get("schedule"):
                schedule.step()
            return loss, out

        return step, [model, optim]

    return make


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_plain_tensors(optimizer: str) -> None:
    made = beside(trained(None, optimizer, schedule=True), batches())
    assert len(made.programs) == 1, made.show()


def _optimizer(rank: int, optimizer: str) -> int:
    layout = Placement.all("cpu"), S(0)
    return len(beside(trained("data", optimizer, schedule=True), batches(5, layout)).programs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_global_tensors(optimizer: str) -> None:
    assert pool(2).run(_optimizer, optimizer) == [1, 1]


def planned(plan: Any, axes: int) -> tuple[Placement, Callable[[], Made]]:
    """A placement, and what makes a step of ``net`` under ``plan`` on it."""
    p = Placement.all("cpu")
    if axes == 2:
        p = Placement("cpu", [[0, 1], [2, 3]], axes=("a", "b"))

    def make() -> Any:
        model = net()
        consistent.parallelize(model, p, plan)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Any, y: Any) -> Any:
            optim.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optim.step()
            return loss

        return step, [model, optim]

    return p, make


def _plan(rank: int, plan: Any, axes: int, sbp: Any) -> tuple[int, int]:
    p, make = planned(plan, axes)
    made = beside(make, batches(7, (p, sbp)))
    return len(made.programs), len(made.programs[0].program.segments)


PLANS = [
    ("data", 1, 3, S(0)), ("zero1", 1, 2, S(0)), ("zero2", 1, 2, S(0)), ("zero3", 1, 3, S(0)),
    ("tensor", 1, 3, B), ({"*weight": S(0), "*": B}, 1, 2, S(0)),
    ({"table.weight": S(1), "*": B}, 1, 3, B), ({"a": "data", "b": "tensor"}, 2, 4, (S(0), B)),
    ({"a": "zero3", "b": "data"}, 2, 4, (S(0), S(0))),
]  # fmt: skip
ON_TWO = [("data", 1, 2, S(0)), ("zero3", 1, 2, S(0)), ("tensor", 1, 2, B)]


@pytest.mark.parametrize(("plan", "axes", "ranks", "sbp"), PLANS + (ON_TWO if ALL else []))
def test_plans(plan: Any, axes: int, ranks: int, sbp: Any) -> None:
    found = pool(ranks).run(_plan, plan, axes, sbp)
    assert all(programs == 1 for programs, _ in found), found
    assert len(set(found)) == 1, found


@on_ranks(2)
def test_accumulation_and_gradients_that_are_there_before(rank: int) -> None:
    p = Placement.all("cpu")

    def make() -> Any:
        model = consistent.parallelize(net(), p)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            with consistent.no_sync():
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            F.cross_entropy(model(y).flatten(0, 1), x.flatten()).backward()
            for param in model.parameters():
                gradient: Any = param.grad
                param.grad = gradient * 0.5  # read by the next call, which adds to it
            optim.step()

        return step, [model, optim]

    assert len(beside(make, batches(6, (p, S(0)))).programs) <= 2


@on_ranks(2)
def test_autocast_and_modes(rank: int) -> None:
    p = Placement.all("cpu")

    def make() -> Any:
        model = consistent.parallelize(net().float(), p)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            optim.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optim.step()
            return loss

        def both(x: Any, y: Any) -> Any:
            model.train(bool(x.shape[0]))
            return step(x, y)

        return both, [model, optim]

    beside(make, batches(6, (p, S(0))))


@on_ranks(2)
def test_evaluation_beside_training_is_another_program(rank: int) -> None:
    p = Placement.all("cpu")
    model = consistent.parallelize(net(), p)

    @consistent.compile(backend="ops", fullgraph=True)
    def forward(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    x = consistent.distribute(torch.arange(6).view(2, 3), p, S(0))
    model.eval()
    wanted = forward(x).full()
    for training in (False, False, True, True, False, True):
        model.train(training)
        found = forward(x)
        if not training:
            assert torch.equal(found.full(), wanted)
            wanted = model(x).full().detach()
        else:
            # Batch norm has learned from the batch, so evaluation gives other values from now on.
            model.eval()
            wanted = model(x).full().detach()
    assert len(forward.programs) == 2, forward.show()


@on_ranks(2)
def test_a_replaced_parameter_is_read_anew(rank: int) -> None:
    p = Placement.all("cpu")
    model: Any = consistent.parallelize(nn.Linear(3, 3).double(), p)
    x = consistent.distribute(randn(4, 3), p, S(0))

    @consistent.compile(backend="ops")
    @torch.no_grad()
    def forward(x: Any) -> Any:
        return model(x)

    for _ in range(3):
        forward(x)
    model.weight = nn.Parameter(model.weight.detach() * 2)
    assert torch.equal(forward(x).full(), model(x).full())
    model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()})
    assert torch.equal(forward(x).full(), model(x).full())
    assert len(forward.programs) == 1
    weight: Any = model.weight.detach()
    model.weight = nn.Parameter(weight.to_global(sbp=S(0)))
    for _ in range(3):
        assert torch.equal(forward(x).full(), model(x).full())
    assert len(forward.programs) == 2


@on_ranks(2)
def test_partial_results_and_arguments_that_are_written(rank: int) -> None:
    p = Placement.all("cpu")

    @consistent.compile(backend="ops", fullgraph=True)
    def step(x: Any, out: Any) -> Any:
        out.add_(x.sum(0))
        return x.sum(0), x, {"twice": x * 2, "out": out}

    for i in range(4):
        x = consistent.distribute(randn(4, 3, seed=i), p, S(0))
        out = consistent.zeros(3, dtype=torch.float64, placement=p, sbp=B)
        total, same, more = step(x, out)
        assert total.sbp == (P,)
        assert same is x
        assert more["out"] is out
        for found, wanted in (
            (total, x.full().sum(0)),
            (more["twice"], x.full() * 2),
            (out, x.full().sum(0)),
        ):
            torch.testing.assert_close(found.full(), wanted)


@on_ranks(3)
def test_ranks_outside_the_placement_follow(rank: int) -> None:
    p = Placement("cpu", [0, 1])

    def make() -> Any:
        model = consistent.parallelize(net(), p)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Any, y: Any) -> Any:
            optim.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optim.step()
            return loss

        return step, [model, optim]

    beside(make, batches(5, (p, S(0))))


@on_ranks(2, timeout=300)  # a machine that has compiled nothing yet takes a minute
def test_inductor(rank: int) -> None:
    made = trained("zero3", "AdamW", clip=True)
    program = beside(made, batches(6, (Placement.all("cpu"), S(0))), "inductor")
    assert len(program.programs) == 1, program.show()


@on_ranks(3)
def test_sorting_a_split_dim_sends_what_sizes_say(rank: int) -> None:
    p = Placement.all("cpu")

    def make() -> Any:
        w = nn.Parameter(consistent.distribute(randn(7, 2, seed=9), p, S(0)))

        def step(x: Any) -> Any:
            w.grad = None
            values, indices = torch.sort(w * x, dim=0, descending=True)
            (values * torch.arange(7).view(7, 1)).sum().backward()
            return values, indices, (w * x).argsort(0), torch.msort(x)

        return step, [w]

    batches = [(consistent.distribute(randn(7, 2, seed=i), p, S(0)),) for i in range(4)]
    beside(make, batches)


@on_ranks(2)
def test_freezing_and_other_memory_are_noticed(rank: int) -> None:
    p = Placement.all("cpu")

    def make() -> Any:
        model: Any = consistent.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), p)
        optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        calls = [0]

        def step(x: Any) -> Any:
            optim.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optim.step()
            return loss

        compiled: list[Any] = []

        def outer(x: Any) -> Any:
            if calls[0] == 4:
                model[0].weight.requires_grad_(False)
            if calls[0] == 8:
                model[0].weight.requires_grad_(True)
            if calls[0] == 12:
                model[1].weight.data = model[1].weight.data * 2
            if calls[0] == 14:
                model[1].weight.data = model[1].weight.detach().to_global(sbp=S(0))
            calls[0] += 1
            return (compiled[0] if compiled else step)(x)

        return outer, [model], step, compiled

    wanted, found = make(), make()
    for model in (wanted[1][0], found[1][0]):
        torch.manual_seed(0)
        for param in model.parameters():
            param.data.normal_(std=0.3)
    found[3].append(consistent.compile(found[2], backend="ops", fullgraph=True))
    for i in range(20):
        x = consistent.distribute(randn(4, 3, seed=i).float() / 8, p, S(0))
        torch.testing.assert_close(found[0](x).full(), wanted[0](x).full())
        for a, b in zip(found[1][0].parameters(), wanted[1][0].parameters(), strict=True):
            torch.testing.assert_close(a.full(), b.full())
            assert (a.grad is None) == (b.grad is None)


@on_ranks(2)
def test_gradients_that_somebody_left_are_added_to(rank: int) -> None:
    p = Placement.all("cpu")
    model, plain = consistent.parallelize(nn.Linear(3, 3), p), nn.Linear(3, 3)
    plain.load_state_dict({k: v.full() for k, v in model.state_dict().items()})  # type: ignore[attr-defined]

    @consistent.compile(backend="ops", fullgraph=True)
    def step(x: Any) -> Any:
        model(x).square().sum().backward()

    for i in range(12):
        x = randn(4, 3, seed=i).float()
        if i < 5 or i % 3 == 0:
            model.zero_grad()
            plain.zero_grad()
        if i == 9:
            model.zero_grad(set_to_none=False)
        step(consistent.distribute(x, p, S(0)))
        plain(x).square().sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full(), b.grad)  # type: ignore[union-attr]
    assert len(step.programs) == 2


def test_recording_keeps_no_more_than_the_step() -> None:
    made: list[Any] = []

    @consistent.compile(backend="ops", fullgraph=True)
    def step(x: Any) -> Any:
        for _ in range(6):
            x = x + 1
            made.append(StorageWeakRef(x.untyped_storage()))
            alive = sum(not ref.expired() for ref in made)
            assert alive <= 2, alive
        made.clear()
        return x

    for _ in range(4):
        assert torch.equal(step(torch.zeros(5)), torch.full((5,), 6.0))
