"""Messages that run beside ops: values are eager's, they are sent in the same order, and no more is
held than is allowed."""

from __future__ import annotations

import re
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.compiled import opaque
from tests.consistent.compiled.steps import beside
from tests.consistent.compiled.test_bounded import WIDE, batches, trained
from tests.ranks import ALL, on_ranks, pool
from tests.twins import randn

CALLS = 5
NOTE = re.compile(r"  overlap: (\d+) messages run beside ops; ([\d.]+) (\w+) held at a time, "
                  r"([\d.]+) (\w+) before")  # fmt: skip
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def figures(text: str) -> tuple[int, float, float]:
    found = NOTE.search(text)
    assert found is not None, text
    after, before = (float(found[i]) * UNITS[found[i + 1]] for i in (2, 4))
    return int(found[1]), after, before


@on_ranks(2, 3)
def test_the_next_gather_runs_beside_a_product(rank: int) -> None:
    p = Placement.all("cpu")
    first, second = (consistent.distribute(randn(7, 7, seed=i), p, S(0)) for i in (1, 2))

    def step(x: Any) -> Any:
        h = torch.tanh(x @ first.to_global(sbp=B))
        return torch.tanh(h @ second.to_global(sbp=B))

    x = consistent.distribute(randn(5, 7), p, S(0))
    texts = []
    for overlap in (False, True):
        made: Any = consistent.compile(step, backend="ops", fullgraph=True, overlap=overlap)
        for _ in range(CALLS):
            torch.testing.assert_close(made(x).full(), step(x).full())
        texts.append(re.findall(r"= (start|wait for|message|mm)\b", made.show()))
    assert texts[0] == ["message", "mm", "message", "mm"]
    assert texts[1] == ["message", "start", "mm", "wait for", "mm"]


@on_ranks(2)
def test_what_is_written_is_sent_as_it_was(rank: int) -> None:
    p = Placement.all("cpu")

    def step(x: Any) -> Any:
        y = torch.tanh(x)
        whole = y.to_global(sbp=B)
        y.mul_(2)
        z = torch.sigmoid(y)
        again = y.to_global(sbp=B)
        y.add_(1)
        return z + y, whole * 3, again * 5

    made: Any = consistent.compile(step, backend="ops", fullgraph=True, overlap=True)
    for i in range(CALLS):
        x = consistent.distribute(randn(7, 4, seed=i), p, S(0))
        for ours, theirs in zip(made(x), step(x), strict=True):
            torch.testing.assert_close(ours.full(), theirs.full())


def _plan(rank: int, plan: Any, rows: int) -> list[Any]:
    p = Placement.all("cpu")
    given = batches(rows, (p, B if plan == "tensor" else S(0)))
    found = []
    for how in ({}, {"overlap": True}, {"overlap": True, "memory": 90_000}):
        made = beside(trained(plan, p), given, **how)
        assert len(made.programs) == 1
        program = made.programs[0].program
        found.append([(c.kind, c.bytes) for c in program.messages()])
        if how:
            moved, after, before = figures(made.show())
            found[-1].append(moved)
            largest = 3 * WIDE * (WIDE + 1) * 8
            bound = max(before, 90_000) if "memory" in how else before + 2 * largest
            assert after <= bound * 1.01, (after, before)
    return found


PLANS = [("zero3", 3, 33), ("tensor", 2, 8), ({"*weight": S(0), "*": B}, 3, 33), ("data", 2, 9),
         ("zero3", 2, 32)]  # fmt: skip


@pytest.mark.parametrize(("plan", "ranks", "rows"), PLANS if ALL else PLANS[:4])
def test_plans(plan: Any, ranks: int, rows: int) -> None:
    for plain, ahead, bound in pool(ranks).run(_plan, plan, rows):
        assert ahead[:-1] == plain, "messages keep their order"
        # Under the others each result is read at once.
        assert (ahead[-1] > 0) == (plan not in ("data", "tensor"))
        assert bound[-1] >= 0


@on_ranks(2)
def test_a_step_that_fails_leaves_nothing_on_its_way(rank: int) -> None:
    p = Placement.all("cpu")
    w = nn.Parameter(consistent.distribute(randn(6, 6, seed=1), p, S(0)))
    index: Any = consistent.distribute(torch.zeros(4, dtype=torch.int64), p, B)

    def step(x: Any, index: Any) -> Any:
        h = torch.tanh(x).index_select(0, index)
        return h.sum() + (torch.tanh(w) @ torch.ones(6, 6).double()).to_global(sbp=B).sum()

    made: Any = consistent.compile(torch.no_grad()(step), backend="ops", overlap=True)
    x = consistent.distribute(randn(5, 6), p, B)
    for _ in range(4):
        torch.testing.assert_close(made(x, index).full(), step(x, index).detach().full())
    with pytest.raises(IndexError):
        made(x, index + 9)
    torch.testing.assert_close(made(x, index).full(), step(x, index).detach().full())


def _by_inductor(rank: int, blocks: int, memory: int | None, rows: int) -> None:
    """Values; and the order of messages, as Inductor's scheduler has one of its own for what no
    data binds."""
    p, sent = Placement.all("cpu"), []
    given = batches(rows, (p, S(0)))
    step = trained("zero3", p, blocks, None)
    made = beside(step, given, "inductor", overlap=True, memory=memory)
    program = made.programs[0].program
    with MonkeyPatch.context() as patch:
        patch.setattr(opaque, "_observed_call", lambda number: nullcontext(sent.append(number)))
        made(*given[-1])
    graphs = [segment.graph.graph for segment in program.segments]
    nodes = [node for graph in graphs for node in graph.nodes if node.target in opaque.ORDERED_OPS]
    assert sent == [node.args[1] for node in nodes] and len(sent) > 8


@pytest.mark.parametrize(
    ("blocks", "memory", "rows"),  # ranks of even parts have one kernel, which is compiled once
    [(2, 50_000, 32), *([(2, 50_000, 33), (1, None, 33), (3, 70_000, 33)] if ALL else [])],
)
def test_inductor(blocks: int, memory: int | None, rows: int) -> None:
    pool(2).run(_by_inductor, blocks, memory, rows, timeout=300)


def test_results_of_one_buffer_are_copied_once_the_side_stream_has_made_them() -> None:
    """As on a GPU, where a message's call returns before what it launched has run."""
    buffer, joined = torch.zeros(5), []

    class Late:
        def join(self, made: list[torch.Tensor] = ()) -> None:  # type: ignore[assignment]
            joined.extend(x.data_ptr() for x in made)
            buffer.fill_(1)

    results = list(buffer.split([2, 3]))
    call = opaque.OpaqueCall("late", lambda xs: results, tuple(map(opaque.shape_of, results)))
    done: Future[list[torch.Tensor]] = Future()
    done.set_result(results)
    with opaque.use_calls({call.number: call}):
        opaque._thread.started_messages[0] = done, Late()  # type: ignore[assignment]
        given = opaque.wait_message([torch.zeros(1)], call.number, 0)
    assert [x.tolist() for x in given] == [[1.0] * 2, [1.0] * 3]
    assert joined == [x.data_ptr() for x in results], "their memory is held for the program"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match='Give True, False or "auto"'):
        consistent.compile(lambda x: x, overlap="yes")
