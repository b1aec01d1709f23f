"""What torch answered on meta tensors is asked once for all layouts and placements of a call, and
again for each call that it may answer otherwise."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, Placement, S
from consistent.dispatch.planning import meta_run
from consistent.dispatch.planning.meta_answers import cached_facts
from consistent.rules.signature import Call, Operand
from consistent.spec import Layout, TensorSpec
from tests.ranks import simulate


def answers(run: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Those about a call with these arguments, of which tensors become operands."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    whole = Layout.whole(Placement("cpu", [0]))
    specs = [TensorSpec.laid(whole, x.shape, x.dtype) for x in given]
    operands = [Operand(i, spec) for i, spec in enumerate(specs)]
    source = iter(operands)
    named = {k: next(source) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    listed = [next(source) if isinstance(x, torch.Tensor) else x for x in args]
    return cached_facts(run, Call("op", tuple(listed), named, tuple(operands)))


X, OTHER = torch.zeros(3, 4), object()
UNLIKE: list[Any] = [
    lambda: answers(torch.add, X, 1),
    lambda: answers(torch.add, X, 1.0),
    lambda: answers(torch.add, X, True),
    lambda: answers(torch.add, X, 2),
    lambda: answers(torch.sub, X, 1),
    lambda: answers(torch.add, X, other=1),
    lambda: answers(torch.add, X[:2], 1),
    lambda: answers(torch.add, X.double(), 1),
    lambda: answers(torch.add, X, X),
    lambda: answers(torch.add, X, (1,)),
    lambda: answers(torch.add, X, [1]),
    lambda: answers(torch.add, X, slice(1)),
    lambda: answers(torch.add, X, slice(True)),
    lambda: answers(torch.add, X, alpha={"a": 1}),
    lambda: answers(torch.add, X, dtype=torch.float16),
]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = [
    contextlib.nullcontext(),
    default_dtype(torch.float64),
    torch.autocast("cpu", torch.float16),
    torch.autocast("cpu", torch.bfloat16),
]


def test_calls_that_torch_may_answer_otherwise_have_their_own_answers() -> None:
    found = []
    for setting in SETTINGS:
        with setting:
            found += [make() for make in UNLIKE]
            again = [make() for make in UNLIKE]
        assert all(a is b for a, b in zip(again, found[-len(UNLIKE) :], strict=True))
    pairs = itertools.combinations(range(len(found)), 2)
    assert [(a, b) for a, b in pairs if found[a] is found[b]] == []


def test_of_an_object_that_torch_does_not_know_nothing_is_kept() -> None:
    for value in (OTHER, [OTHER], {"a": OTHER}, torch.Generator(), slice(OTHER)):
        assert answers(torch.add, X, value) is not answers(torch.add, X, value)


def test_a_call_is_asked_about_once_for_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(run: Any, call: Call) -> Any:
        asked.append((call.name, [o.shape for o in call.operands]))
        return on_meta(run, call)

    on_meta = meta_run.run_on_meta
    monkeypatch.setattr(meta_run, "run_on_meta", ask)

    def main(rank: int) -> None:
        for ranks in ([0, 1], [1, 2], [2, 0]):
            placement = Placement("cpu", ranks)
            for sbp in (B, S(0), S(1), P):
                x = consistent.zeros(23, 29, placement=placement, sbp=sbp)
                assert x.cumsum(1).shape == (23, 29)
                assert x.cumprod(0).shape == (23, 29)

    simulate(main, 3)
    # Ranks are threads, which may ask the same before one of them is answered.
    for name in ("cumsum", "cumprod"):
        assert 1 <= asked.count((name, [(23, 29)])) <= 3
