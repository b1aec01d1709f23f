"""Steps that cannot be programs: one clear sentence with the user's line, and never a wrong
value."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks
from tests.twins import randn


def reads_a_value(x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x * 3


def reads_an_item(x: Any) -> Any:
    return x * x.sum().item()


def reads_a_list(x: Any) -> Any:
    return x * x.sum(0).tolist()[0]


def has_a_shape_by_values(x: Any) -> Any:
    return x[x > 0]


def uses_what_cannot_be_found(x: Any) -> Any:
    return x * sneaked()


SECRET = torch.ones(())


def sneaked() -> torch.Tensor:
    return sys.modules[__name__].__dict__["SEC" + "RET"]


def draws_from_another_generator(x: Any) -> Any:
    return x + torch.rand_like(x, generator=torch.Generator().manual_seed(1))


STEPS = {
    reads_a_value: "reads a value",
    reads_an_item: "reads a value",
    reads_a_list: "reads a value",
    has_a_shape_by_values: "depends on values",
    uses_what_cannot_be_found: "neither an argument, nor a parameter",
}


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
@on_ranks(2)
def test_an_error_names_the_line(rank: int, step: Any) -> None:
    p = Placement.all("cpu")
    compiled = consistent.compile(step, backend="ops", fullgraph=True)
    x = consistent.distribute(randn(5, 3), p, S(0))
    compiled(x)
    with pytest.raises(consistent.CannotRecord, match=STEPS[step]) as caught:
        compiled(x)
    assert "test_bad_input.py:" in str(caught.value)


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
@on_ranks(2)
def test_without_fullgraph_it_runs_as_it_is_written(rank: int, step: Any) -> None:
    p = Placement.all("cpu")
    compiled = consistent.compile(step, backend="ops")
    said = []
    for i in range(5):
        x = consistent.distribute(randn(5, 3, seed=i) - (i % 2), p, S(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = compiled(x)
        said += [str(w.message) for w in caught if "not as a program" in str(w.message)]
        torch.testing.assert_close(found.full(), step(x.full()))
    assert len(said) == 1, said
    assert STEPS[step] in said[0]


@on_ranks(2)
def test_what_python_keeps_is_noticed(rank: int) -> None:
    p = Placement.all("cpu")
    model: Any = nn.Linear(3, 3)
    consistent.parallelize(model, p)
    model.calls = 0
    seen: list[Any] = []

    def counts(x: Any) -> Any:
        model.calls += 1
        return x * model.calls

    def collects(x: Any) -> Any:
        seen.append(x)
        return x * len(seen)

    x = consistent.distribute(randn(4, 3), p, S(0))
    for step, what in ((counts, "model.calls"), (collects, "seen")):
        compiled = consistent.compile(step, backend="ops")
        with pytest.warns(UserWarning, match=f"changes {what}"):
            found = [compiled(x).full() for _ in range(6)]
        for i, value in enumerate(found):
            torch.testing.assert_close(value, x.full() * (i + 1))


@on_ranks(2)
def test_ranks_that_are_given_other_shapes_run_as_written(rank: int) -> None:
    p = Placement.all("cpu")
    model: Any = consistent.parallelize(nn.Linear(3, 2).double(), p, inputs=S(0))
    compiled = consistent.compile(lambda x: model(x), backend="ops")
    rows = [(4, 4), (4, 4), (4, 4), (3, 5), (3, 5), (3, 5), (4, 4), (4, 5), (4, 5), (4, 5)]
    for i, given in enumerate(rows):
        parts = [randn(n, 3, seed=10 * i + r) for r, n in enumerate(given)]
        with torch.no_grad():
            found = compiled(parts[rank])
            weight, bias = model.weight.full(), model.bias.full()
        torch.testing.assert_close(found.full(), torch.cat(parts) @ weight.T + bias)


@on_ranks(2)
def test_a_rank_that_cannot_record_holds_back_the_others(rank: int) -> None:
    p = Placement.all("cpu")

    def step(x: Any) -> Any:
        y = x + 1
        if rank == 1:
            sneaked().exp()
        return y.sum(0).to_global(sbp=B)

    compiled = consistent.compile(step, backend="ops")
    x = consistent.distribute(randn(4, 3), p, S(0))
    with pytest.warns(UserWarning, match="not as a program"):
        for _ in range(4):
            torch.testing.assert_close(compiled(x).full(), x.full().sum(0) + 4)


def test_words_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="backend is 'fast'"):
        consistent.compile(lambda x: x, backend="fast")
    graph = consistent.nn.Graph()
    with pytest.raises(ValueError, match="backend is 'fast'"):
        graph.config.enable_compile(backend="fast")
    with pytest.raises(RuntimeError, match="no step was recorded yet"):
        graph.show()


@on_ranks(2)
def test_an_error_of_the_step_is_its_own(rank: int) -> None:
    p = Placement.all("cpu")
    x = consistent.distribute(randn(4, 3), p, S(0))
    raising = [False]

    def step(x: Any) -> Any:
        if raising[0]:
            raise KeyError("mine")
        return x * 2

    compiled = consistent.compile(step, backend="ops", fullgraph=True)
    compiled(x)
    raising[0] = True
    with pytest.raises(KeyError, match="mine") as caught:
        compiled(x)
    assert "was recorded" in "".join(caught.value.__notes__)
    raising[0] = False
    for _ in range(3):
        torch.testing.assert_close(compiled(x).full(), x.full() * 2)


@on_ranks(2)
def test_a_module_that_trains_keeps_its_graph(rank: int) -> None:
    p = Placement.all("cpu")
    model: Any = consistent.parallelize(nn.Linear(3, 3), p)
    compiled = consistent.compile(model, backend="ops")
    x = consistent.distribute(randn(4, 3).float(), p, S(0))
    with pytest.warns(UserWarning, match="Compile the whole step"):
        for _ in range(4):
            model.zero_grad()
            compiled(x).sum().backward()
            torch.testing.assert_close(model.bias.grad.full(), torch.full((3,), 4.0))
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x).full(), model(x).full())
    assert compiled.programs[-1].program is not None
