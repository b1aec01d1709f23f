"""Programs whose ops are captured and replayed, by a stand-in for CUDA graphs: values, fixed
addresses, capture again, cuts, and what cannot be captured."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import consistent
from consistent import B, Placement, S
from consistent.compiled import cuda_graphs
from consistent.compiled.cuda_graphs.cut import split_into_steps
from consistent.compiled.cuda_graphs.replayed import MAX_CAPTURES
from consistent.compiled.opaque import MESSAGE
from tests.consistent.compiled.recorded_graphs import RecordedGraphs
from tests.consistent.compiled.steps import beside
from tests.consistent.compiled.test_bounded import batches, trained
from tests.ranks import on_ranks, pool
from tests.twins import randn

_aten = torch.ops.aten


@contextmanager
def stand_in(fails: str = "") -> Iterator[list[str]]:
    """In place of CUDA graphs; gives what is done."""
    before, done = cuda_graphs.capturer, []
    cuda_graphs.capturer = type("Ours", (RecordedGraphs,), {"done": done, "fails": fails})
    try:
        yield done
    finally:
        cuda_graphs.capturer = before


def _plan(rank: int, plan: Any, rows: int) -> list[str]:
    p = Placement.all("cpu")

    def slower(changed: list[Any]) -> None:
        for group in changed[1].param_groups:
            group["lr"] *= 0.7

    given = [*batches(rows, (p, B if plan == "tensor" else S(0)))] * 2
    with stand_in() as done:
        beside(trained(plan, p, 2), given, after=slower, cuda_graph=True)
    return done


@pytest.mark.parametrize(("plan", "ranks"), [("data", 2), ("zero3", 3), ("tensor", 4)])
def test_training(plan: str, ranks: int) -> None:
    """Losses, parameters, gradients and state are eager's, with dropout and changing rates."""
    for done in pool(ranks).run(_plan, plan, 12):
        stretches = done.count("warm up")
        assert stretches > 1, "messages cut"
        # An input that lay where it lay in the call before, by chance, and moves later, costs more.
        captures = done.count("capture")
        assert captures % stretches == 0 and 0 < captures <= MAX_CAPTURES * stretches, done
        assert done.count("replay") >= 3 * stretches


@on_ranks(1, 2)
def test_results_of_a_call_stay(rank: int) -> None:
    def step(x: Any) -> Any:
        y = x * 2
        return y, y[1:], torch.tanh(x).to_global(sbp=B)

    p = Placement.all("cpu")
    with stand_in() as done, torch.no_grad():
        made: Any = consistent.compile(step, backend="ops", fullgraph=True, cuda_graph=True)
        inputs = [consistent.distribute(randn(5, 3, seed=i), p, B) for i in range(7)]
        found = [made(x) for x in inputs]
    for ours, x in zip(found, inputs, strict=True):
        for mine, theirs in zip(ours, step(x), strict=True):
            torch.testing.assert_close(mine.full(), theirs.full())
    assert found[-1][0]._base is None and "replay" in done
    last = found[-1][0].to_local()
    assert last.untyped_storage().data_ptr() == found[-1][1].to_local().untyped_storage().data_ptr()


def test_what_has_moved_is_captured_anew() -> None:
    w = nn.Parameter(randn(3, 3))

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            w.mul_(0.5)
        return (x @ w).detach()

    twin = w.detach().clone()
    with stand_in() as done:
        made: Any = consistent.compile(step, backend="ops", fullgraph=True, cuda_graph=True)
        for i in range(12):
            if i == 7:
                w.data = w.data.clone()
            x = randn(4, 3, seed=i)
            twin *= 0.5
            torch.testing.assert_close(made(x), x @ twin)
            torch.testing.assert_close(w.detach(), twin)
    assert done.count("capture") == 2, "once for the arguments, which get buffers, and once for w"


def test_what_moves_always_is_not_captured() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    keep = []
    with stand_in() as done, pytest.warns(UserWarning, match="lie elsewhere in each call") as said:
        made: Any = consistent.compile(step, backend="ops", fullgraph=True, cuda_graph=True)
        for i in range(12):
            x = randn(4, 3, seed=i)
            keep.append(x)
            wanted = x + 1
            torch.testing.assert_close(made(x), wanted * 2)
            torch.testing.assert_close(x, wanted)
    assert done.count("capture") == 4
    assert len(said) == 1


@on_ranks(2)
def test_an_error_at_capture_is_a_warning(rank: int) -> None:
    p = Placement.all("cpu")

    def step(x: Any) -> Any:
        return torch.tanh(torch.exp(x).to_global(sbp=B))

    fails = "operation not permitted when stream is capturing" if rank == 0 else ""
    with stand_in(fails), warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        made: Any = consistent.compile(step, backend="ops", fullgraph=True, cuda_graph=True)
        for i in range(6):
            x = consistent.distribute(randn(5, 3, seed=i), p, S(0))
            torch.testing.assert_close(made(x).full(), step(x).full())
    texts = [str(each.message) for each in said]
    assert sum("not permitted when stream is capturing" in text for text in texts) == (rank == 0)


def _node(graph: Graph, target: Any, args: tuple, device: str, shape: tuple = (2,)) -> Any:
    node = graph.call_function(target, args)
    node.meta.update(device=torch.device(device), shape=shape, memory=object())
    return node


def test_cuts() -> None:
    graph = Graph()
    x, count = graph.placeholder("x"), graph.placeholder("count")
    x.meta.update(device=torch.device("cuda"), shape=(2,), memory="x")
    count.meta.update(device=torch.device("cpu"), shape=(), memory="count")
    a = _node(graph, _aten.exp.default, (x,), "cuda")
    rate = _node(graph, _aten.mul.Tensor, (count, 2), "cpu", ())
    b = _node(graph, _aten.mul.Tensor, (a, rate), "cuda")
    more = _node(graph, _aten.add_.Tensor, (count, 1), "cpu", ())
    more.meta["written"] = {"count"}
    c = _node(graph, _aten.mul.Tensor, (b, count), "cuda")
    again = _node(graph, _aten.add_.Tensor, (count, 1), "cpu", ())
    again.meta["written"] = {"count"}
    message = graph.call_function(MESSAGE, ([c], 1))
    item = _node(graph, operator.getitem, (message, 0), "cuda")
    drawn = _node(graph, _aten.rand_like.default, (item,), "cuda")
    host = _node(graph, _aten._to_copy.default, (drawn,), "cpu")
    graph.output((host,))
    steps = split_into_steps(GraphModule(nn.Module(), graph), "cuda")
    found = [(step.kind, [n.name for n in step.nodes]) for step in steps]
    assert found == [
        ("host", [rate.name, more.name]),
        ("ops", [a.name, b.name, c.name]),
        ("host", [again.name]),
        ("call", [message.name, item.name]),
        ("call", [drawn.name]),
        ("host", [host.name]),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="torch finds no CUDA device here"):
        consistent.compile(lambda x: x, cuda_graph=True)
    with pytest.raises(ValueError, match="cuda_graph is 'yes'"):
        consistent.compile(lambda x: x, cuda_graph="yes")  # type: ignore[arg-type]
    graph: Any = type("G", (consistent.nn.Graph,), {"build": lambda self, x: x})()
    with pytest.raises(ValueError, match="enable_compile: cuda_graph is True"):
        graph.config.enable_compile(cuda_graph=True)
