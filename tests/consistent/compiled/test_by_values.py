"""What values decide is a part of a program: exchanges of as many items as there are, products of
groups. A program sends as much as the step does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, Placement, S
from mirrored.transports.counting import counting
from tests.consistent.compiled.steps import Made, beside
from tests.consistent.nn.experts.test_forward import Mixture, gated
from tests.ranks import ALL, on_ranks
from tests.rounding import gamma
from tests.twins import randn

ITEMS = 1201  # pieces are long enough to be exchanged
AGREED = 8  # bytes of the all-reduce by which ranks agree


def _sorting(items: int = ITEMS, all_ways: bool = True) -> Made:
    p = Placement.all("cpu")
    w = nn.Parameter(consistent.distribute(randn(items, seed=9), p, S(0)))

    def step(x: Any) -> Any:
        w.grad = None
        values, indices = torch.sort(w * x, dim=0, descending=True)
        (values * torch.arange(items)).sum().backward()
        others = ((w * x).argsort(0), torch.msort(x)) if all_ways else ()
        return values, indices, *others

    return step, [w]


def _batches(*shape: int) -> list[tuple]:
    p = Placement.all("cpu")
    return [(consistent.distribute(randn(*shape, seed=i) * (i + 1), p, S(0)),) for i in range(4)]


def _sent(step: Any, batches: list[tuple]) -> list[int]:
    """Bytes of this rank in each call of the step."""
    found = []
    for batch in batches:
        with counting() as counted:
            step(*batch)
        found.append(sum(call.bytes for call in counted.calls if call.name != "gather_objects"))
    return found


def _sends_as_much(make: Any, batches: list[tuple], program: Any) -> None:
    wanted = _sent(make()[0], batches)
    ranks = torch.distributed.get_world_size()
    agreed = -(-2 * (ranks - 1) * AGREED // ranks)
    assert _sent(program, batches) == [n + agreed for n in wanted]


@on_ranks(2, 3, 4)
def test_sorting_exchanges_as_many_items_as_values_say(rank: int) -> None:
    batches = _batches(ITEMS)
    program = beside(_sorting, batches)
    assert "as_one" in [call.kind for call in program.programs[-1].program.messages()]
    _sends_as_much(_sorting, batches, program)


def _mixture(sbp: Any) -> Made:
    """Rows that are sorted by expert, and a product of each expert's rows. Torch's product takes no
    float64: the products are exact, and the numbers that are added are positive."""
    p = Placement.all("cpu")
    scores = (randn(6, 5, seed=7) * 1024).round() / 1024
    weights = (2 * randn(5, 6, 6, seed=8)).round()
    router = nn.Parameter(consistent.distribute(scores.float(), p, B))
    experts = nn.Parameter(consistent.distribute(weights.float(), p, sbp))

    def step(x: Any) -> Any:
        router.grad = experts.grad = None
        weight, chosen = (x @ router).softmax(1).max(1)
        chosen, order = chosen.sort()
        counts = torch.histc(chosen.float(), 5, 0, 4)
        made = F.grouped_mm(x[order], experts, offs=counts.cumsum(0, dtype=torch.int32))
        loss = (made.square() * weight[order].unsqueeze(1)).sum()
        loss.backward()
        return loss, made

    return step, [router, experts]


# 23 * 6 numbers are added, of which softmax has rounded each some 20 times.
MIXED = gamma(23 * 6 + 20, torch.float32)


def _rows() -> list[tuple]:
    return [(x.round().float(),) for (x,) in _batches(23, 6)]


@on_ranks(2, 3)
def test_products_of_groups(rank: int) -> None:
    batches = _rows()
    for sbp in (B, S(0), S(1), S(2)):

        def make(sbp: Any = sbp) -> Made:
            return _mixture(sbp)

        _sends_as_much(make, batches, beside(make, batches, rtol=MIXED))


def _routed(mixture: nn.Module, placement: Placement, plan: Any) -> Made:
    model = consistent.parallelize(mixture, placement, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        out, even = model(x)
        loss = out.square().sum() + even
        loss.backward()
        optimizer.step()
        return loss

    return step, list(model.parameters())


@on_ranks(3)
def test_tokens_that_are_sent_to_their_experts(rank: int) -> None:
    batches = _batches(8, 3, 4)
    program = beside(lambda: _routed(Mixture(7), Placement.all("cpu"), "zero3+expert"), batches)
    kinds = [call.kind for call in program.programs[-1].program.messages()]
    assert kinds.count("as_one") == 2, kinds  # forward, and backward, which runs it again


@on_ranks(4)
def test_tokens_that_are_sent_to_experts_split_by_another_axis(rank: int) -> None:
    grid = Placement("cpu", [[0, 1], [2, 3]], axes=("ep", "tp"))
    plan = {"ep": "zero3+expert", "tp": "tensor"}
    values = [randn(7, 3, 4, seed=i) * (i + 1) for i in range(3)]
    batches = [(consistent.distribute(x, grid, (S(0), B)),) for x in values]
    program = beside(lambda: _routed(gated(5), grid, plan), batches)
    calls = [call for call in program.programs[-1].program.messages() if call.kind == "as_one"]
    assert [call.ranks for call in calls] == [(0, 1, 2, 3)] * 2, calls


def _table() -> Made:
    p = Placement.all("cpu")
    table = nn.Parameter(consistent.distribute(randn(11, 3, seed=9), p, S(0)))

    def step(x: Any) -> Any:
        table.grad = None
        out = F.embedding((x.abs() * 5).long() % 11, table)
        out.square().sum().backward()
        return out

    return step, [table]


@on_ranks(3)
def test_rows_that_are_fetched_from_their_owners(rank: int) -> None:
    batches = _batches(7, 4)
    program = beside(_table, batches)
    kinds = [call.kind for call in program.programs[-1].program.messages()]
    assert kinds.count("as_one") == 2, kinds
    _sends_as_much(_table, batches, program)


def _products() -> Made:
    """Products of as many rows as values say; all are whole numbers, of which sums are exact."""
    p = Placement.all("cpu")
    weights = (2 * randn(5, 6, 6, seed=8)).round().float()
    experts = nn.Parameter(consistent.distribute(weights, p, S(0)))

    def step(x: Any) -> Any:
        experts.grad = None
        counts = torch.histc(x.sum(1), 5, -99, 99)
        made = F.grouped_mm(x, experts, offs=counts.cumsum(0, dtype=torch.int32))
        made.sum().backward()
        return made

    return step, [experts]


@on_ranks(2, timeout=300)  # a machine that has compiled nothing yet takes a minute
def test_inductor(rank: int) -> None:
    even = ITEMS - 1  # of even parts the ranks have one kernel, which is compiled once
    program = beside(lambda: _sorting(even, False), _batches(even)[:3], "inductor")
    assert "as_one" in [call.kind for call in program.programs[-1].program.messages()]
    beside(_products, _rows(), "inductor")
    if ALL:
        beside(lambda: _mixture(S(0)), _rows(), "inductor", rtol=MIXED)
