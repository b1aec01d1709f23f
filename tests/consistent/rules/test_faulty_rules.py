"""A fault in a rule surfaces: only ``DoesNotFit`` makes an op run whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from consistent import B, Placement, S, distribute
from consistent.dispatch.plans.plan import clear_plans
from consistent.rules import ROWS, Call, DoesNotFit, Row
from tests.ranks import simulate

ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
FAULTS = (*ERRORS, ZeroDivisionError, AssertionError)


@pytest.fixture(autouse=True)
def _plans_are_made_anew() -> Iterator[None]:
    clear_plans()
    yield
    clear_plans()


def _enter(patch: pytest.MonkeyPatch, error: type[Exception], part: str) -> None:
    def raises(call: Call, *_: object) -> object:
        raise error("a fault in the rule")

    parts = {part: raises}
    patch.setitem(ROWS, "inner", Row("inner", **{"rule": "mk, nk -> mn", **parts}))  # type: ignore


def _inner(rank: int) -> torch.Tensor:
    p = Placement("cpu", [0, 1])
    x, y = distribute(torch.ones(4, 3), p, S(0)), distribute(torch.ones(2, 3), p, B)
    return torch.inner(x, y).full()


@pytest.mark.parametrize("part", ["rule", "extremes", "outs", "localize"])
@pytest.mark.parametrize("error", FAULTS)
def test_it_is_raised(monkeypatch: pytest.MonkeyPatch, error: type[Exception], part: str) -> None:
    _enter(monkeypatch, error, part)
    with pytest.raises(error, match="a fault in the rule"):
        simulate(_inner, 2)


def test_a_rule_that_does_not_fit_lets_the_op_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    _enter(monkeypatch, DoesNotFit, "rule")
    for found in simulate(_inner, 2):
        assert torch.equal(found, torch.full((4, 2), 3.0))
