"""Each pass on a step where it applies, and on one where it may not: values, messages and text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

import consistent
from consistent import B, Placement, S
from consistent.compiled import CompiledStep, passes
from tests.ranks import on_ranks
from tests.twins import randn


def recorded(step: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The program of a step on global tensors, whose values are checked, and its text."""
    compiled: Any = consistent.compile(step, backend="ops", fullgraph=True)
    assert isinstance(compiled, CompiledStep)
    wanted = [x.full() for x in step(*args)]
    for _ in range(4):
        for ours, theirs in zip(compiled(*args), wanted, strict=True):
            torch.testing.assert_close(ours.full(), theirs)
    return compiled.programs[0].program, compiled.show()


def split(*sizes: int, seed: int = 0) -> Any:
    return consistent.distribute(randn(*sizes, seed=seed), Placement.all("cpu"), S(0))


def test_every_pass_is_in_the_list_once() -> None:
    taken = ["Trace", "CompileOptions"]
    found = []
    for module in iter_modules(passes.__path__):
        inside = vars(import_module(f"{passes.__name__}.{module.name}")).values()
        for each in filter(inspect.isfunction, inside):
            given = [str(p.annotation) for p in inspect.signature(each).parameters.values()]
            if each.__module__.endswith(f".{module.name}") and given == taken:
                found += [] if each.__name__.startswith("_") else [each]
    assert len(passes.PASSES) == len(found) and set(passes.PASSES) == set(found)


@on_ranks(2, 3)
def test_equal_messages_are_sent_once(rank: int) -> None:
    def step(x: Any) -> Any:
        return torch.tanh(x.to_global(sbp=B)), torch.exp(x.to_global(sbp=B)), x * 2

    program, text = recorded(step, split(6, 4))
    assert [call.kind for call in program.messages()] == ["all_gather_into_tensor"], text
    (saved,) = program.saved
    assert saved.why.startswith("merge_equal")
    assert saved.bytes == program.bytes
    assert "test_passes.py" in saved.where
    assert "not sent: all_gather_into_tensor" in text


@on_ranks(2)
def test_what_was_written_meanwhile_is_sent_again(rank: int) -> None:
    def step(x: Any) -> Any:
        y = x * 1
        first = y.to_global(sbp=B).exp()  # a result itself would not be shared anyway
        y.add_(1)
        return first, y.to_global(sbp=B).exp()

    program, text = recorded(step, split(6, 4))
    assert len(program.messages()) == 2, text


@on_ranks(2)
def test_results_that_are_written_are_not_shared(rank: int) -> None:
    def step(x: Any) -> Any:
        first, second = x.to_global(sbp=B), x.to_global(sbp=B)
        first.mul_(3)
        return first, second

    def given_away(x: Any) -> Any:
        return x.to_global(sbp=B), x.to_global(sbp=B)

    for each in (step, given_away):  # the caller may write into what it gets
        program, text = recorded(each, split(6, 4))
        assert len(program.messages()) == 2, text


@on_ranks(2)
def test_no_more_than_allowed_is_kept(rank: int) -> None:
    def step(x: Any) -> Any:
        return torch.tanh(x.to_global(sbp=B)).sum(), torch.exp(x.to_global(sbp=B)).sum()

    program, _ = recorded(step, split(2048, 1024))  # 16 MiB in float64, which may be kept
    assert len([c for c in program.messages() if c.kind == "all_gather_into_tensor"]) == 1
    program, _ = recorded(step, split(2050, 1024))
    assert len([c for c in program.messages() if c.kind == "all_gather_into_tensor"]) == 2


@on_ranks(2, 3)
def test_sums_are_added_before_they_are_sent(rank: int) -> None:
    def step(x: Any, y: Any) -> Any:
        return (x.sum(0).to_global(sbp=B) + y.sum(0).to_global(sbp=B) + x.amin(0).to_global(sbp=B),)

    program, text = recorded(step, split(6, 4), split(6, 4, seed=1))
    # The minimum is reduced in another way.
    assert sorted((c.kind, c.op) for c in program.messages()) == [
        ("all_reduce", "min"),
        ("all_reduce", "sum"),
    ], text
    assert [saved.why.partition(":")[0] for saved in program.saved] == ["reassociate_all_reduce"]


@on_ranks(2)
def test_sums_that_are_used_elsewhere_are_sent(rank: int) -> None:
    def step(x: Any, y: Any) -> Any:
        a, b = x.sum(0).to_global(sbp=B), y.sum(0).to_global(sbp=B)
        return a + b, torch.tanh(a)

    program, text = recorded(step, split(6, 4), split(6, 4, seed=1))
    assert len(program.messages()) == 2, text


@on_ranks(2, 3)
def test_an_own_part_is_not_gathered(rank: int) -> None:
    def step(x: Any) -> Any:
        return (torch.tanh(x.to_global(sbp=B).to_global(sbp=S(0))),)

    program, text = recorded(step, split(7, 4))
    assert program.messages() == [], text
    assert [saved.why.partition(":")[0] for saved in program.saved] == ["remove_redundant_gather"]

    def turned(x: Any) -> Any:
        return (torch.tanh(x.to_global(sbp=B).to_global(sbp=S(1))),)

    program, text = recorded(turned, split(7, 4))
    assert len(program.messages()) == 1, text
