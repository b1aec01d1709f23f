"""Programs that hold less at a time: values are eager's bit for bit, and what is counted is what is
held while they run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import consistent
from consistent import B, Placement, S
from consistent.nn import Layouts, Plan
from tests.consistent.compiled.steps import beside
from tests.ranks import ALL, on_ranks, pool
from tests.twins import randn

CALLS = 4
WIDE = 24


class Block(nn.Module):
    """A norm, two products with a gelu between them, and dropout, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up = nn.Linear(WIDE, 3 * WIDE)
        self.down = nn.Linear(3 * WIDE, WIDE)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def trained(plan: Any, placement: Any, blocks: int = 3, optimizer: Any = torch.optim.AdamW) -> Any:
    def make() -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block() for _ in range(blocks))).double()
        if plan is not None:
            each_its_own = Plan({"*": Layouts((S(0),), use=(B,))}, keep_bytes=0)
            given = each_its_own if plan == "zero3" else plan
            consistent.parallelize(model, placement, given)
        optim = optimizer and optimizer(model.parameters(), lr=0.01)

        def step(x: Any) -> Any:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if optim:
                optim.step()
            return loss

        return step, [model, optim]

    return make


def batches(rows: int, layout: Any) -> list[tuple]:
    made = []
    for i in range(CALLS):
        x = randn(rows, WIDE, seed=i)
        made.append((x if layout is None else consistent.distribute(x, *layout),))
    return made


def figures(program: Any) -> tuple[int, int, int, int]:
    """Bytes held before and after, values made again, gathers repeated."""
    (note,) = [n for n in program.notes if n.startswith("memory: ")]
    found = re.fullmatch(
        r"memory: ([\d.]+ \w+) held at a time, ([\d.]+ \w+) after (\d+) values are made again and "
        r"(\d+) gathered again; the bound is .*",
        note,
    )
    assert found is not None, note
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    before, after = (
        round(float(number) * units[unit]) for number, unit in (found[i].split() for i in (1, 2))
    )
    return before, after, int(found[3]), int(found[4])


class Holding(TorchDispatchMode):
    """The most bytes that new memories hold at a time, after each op."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._alive = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {self._number(x) for x in torch.utils._pytree.tree_leaves((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            number = self._number(x)
            if number is not None and number not in known and number not in self._alive:
                storage = x.untyped_storage()
                self._alive[number] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {n: one for n, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return out

    def _number(self, x: Any) -> int | None:
        return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None


def held(made: Any, batch: tuple) -> int:
    with Holding() as holding:
        made(*batch)
    return holding.most


def test_what_was_overwritten_is_not_made_again_of_what_is_there_now() -> None:
    def step(x: torch.Tensor) -> Any:
        a = x + 1
        kept = torch.tanh(a)  # held at the peak, and could be made again of `a`
        a.mul_(3)
        wide = torch.cat([a, a, a, a])
        total = (wide.t() @ wide).sum()
        return (kept * a).sum() + total

    x = randn(64, WIDE)
    made: Any = consistent.compile(step, backend="ops", fullgraph=True, memory=0)
    for _ in range(CALLS):
        torch.testing.assert_close(made(x), step(x), rtol=0, atol=0)
    assert made.show().count("tanh(") == 1, made.show()


def test_plain_tensors_are_made_again() -> None:
    free = beside(trained(None, None), batches(64, None), memory=1 << 40)
    before, after, again, gathered = figures(free.programs[0].program)
    assert before == after
    assert (again, gathered) == (0, 0)
    bound = before * 3 // 4
    made = beside(trained(None, None), batches(64, None), memory=bound)
    _, after, again, gathered = figures(made.programs[0].program)
    assert (again > 0, gathered) == (True, 0)
    assert after <= bound * 1.01  # they are printed with four digits
    text = made.show()
    assert text.count("gelu(") == free.show().count("gelu(") + 2, text
    assert re.search(r"= gelu\(.*, again", text), text
    # Dropout on plain tensors is torch's own, which is drawn once.
    assert text.count("bernoulli_(") == free.show().count("bernoulli_(")
    batch = batches(64, None)[0]
    least, most = held(made, batch), held(free, batch)
    assert least < most * 0.9
    assert abs(least - after) <= 0.1 * after, (least, after)


def test_what_cannot_be_let_go_of_is_said() -> None:
    made = beside(trained(None, None), batches(64, None), memory=0)
    before, after, again, _ = figures(made.programs[0].program)
    assert again > 0
    assert 0 < after < before
    assert "the bound is 0 B, and nothing else can be let go of" in made.show()


def _plan(rank: int, plan: Any, rows: int) -> list[Any]:
    p = Placement.all("cpu")
    layout = p, B if plan == "tensor" else S(0)
    given = batches(rows, layout)
    free = beside(trained(plan, p), given, memory=1 << 40)
    before, _, again, gathered = figures(free.programs[0].program)
    assert (again, gathered) == (0, 0)
    bound = before // 2
    made = beside(trained(plan, p), given, memory=bound)
    assert len(made.programs) == 1
    before, after, again, gathered = figures(made.programs[0].program)
    kinds = [c.kind for c in made.programs[0].program.messages()]
    sent = free.programs[0].program.bytes, made.programs[0].program.bytes
    return [before, after, again, gathered, kinds, sent]


PLANS = [
    ("data", 3, 257), ("zero3", 2, 65), ("tensor", 2, 32), ({"*weight": S(0), "*": B}, 3, 49),
    ("data", 2, 256), ("zero3", 3, 64), ({"*weight": S(0), "*": B}, 2, 48),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "ranks", "rows"), PLANS if ALL else PLANS[:4])
def test_plans(plan: Any, ranks: int, rows: int) -> None:
    found = pool(ranks).run(_plan, plan, rows)
    for before, after, again, gathered, kinds, sent in found:
        assert after < before * 0.9
        assert again > 0
        assert kinds == found[0][4]
        assert gathered == found[0][3]
        assert (sent[1] > sent[0]) == (gathered > 0 or plan == "zero3")


@on_ranks(2, 3)
def test_random_ops_give_the_same_numbers_again(rank: int) -> None:
    p = Placement.all("cpu")

    def make() -> Any:
        w = nn.Parameter(consistent.distribute(randn(WIDE, WIDE, seed=1), p, B))

        def step(x: Any) -> Any:
            w.grad = None
            for _ in range(4):
                x = F.dropout(torch.tanh(x @ w), 0.25)
            x.square().mean().backward()
            return torch.rand_like(w)

        return step, [w]

    free = beside(make, batches(65, (p, S(0))), memory=1 << 40)
    before = figures(free.programs[0].program)[0]
    made = beside(make, batches(65, (p, S(0))), memory=before * 3 // 4)
    assert re.search(r"= random .*, again", made.show()), made.show()


@on_ranks(2)
def test_with_layouts_chosen_together(rank: int) -> None:
    p = Placement.all("cpu")
    plan = {"*weight": S(0), "*": B}
    made = beside(trained(plan, p), batches(48, (p, S(0))), layouts="auto", memory=100_000)
    assert len(made.programs) == 1
    text = made.show()
    assert "  memory: " in text
    assert "  layouts: " in text


@on_ranks(2)
def test_a_graph(rank: int) -> None:
    p = Placement.all("cpu")
    model = consistent.parallelize(nn.Sequential(Block(), Block()).double(), p)

    class Train(consistent.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

        def build(self, x: Any) -> Any:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    graph = Train()
    graph.config.enable_compile(backend="ops", memory=10_000, overlap=True)
    for (x,) in batches(65, (p, S(0))):
        graph(x)
    assert "values are made again" in graph.show()
    assert "messages run beside ops" in graph.show()


@on_ranks(3)
def test_a_rank_that_cannot_record(rank: int) -> None:
    p = Placement.all("cpu")
    w = consistent.distribute(randn(4, 4), p, S(0))
    calls = [0]

    @consistent.compile(backend="ops", memory=1000)
    def step(x: Any) -> Any:
        if rank == 1:
            calls[0] += 1
        return (x @ w).sum()

    x = consistent.distribute(randn(6, 4), p, S(0))
    for _ in range(6):
        torch.testing.assert_close(step(x).full(), (x @ w).sum().full())
    assert not any(made.program for made in step.programs)


def test_bad_input() -> None:
    for memory in (-1, 1.5, "1 GiB"):
        with pytest.raises(ValueError, match="Give a whole number of bytes"):
            consistent.compile(lambda x: x, memory=memory)  # type: ignore[arg-type]
