"""Islands train as copies in one process do that an outer optimizer brings together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import consistent
from tests.launch import launch

from .program import alone

PROGRAM = Path(__file__).with_name("program.py")
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
GIVEN: dict[str, Any] = {"islands": 2, "plan": "zero3", "inner": "AdamW", "outer": NESTEROV}


def run(ranks: int = 4, **options: Any) -> list[dict[str, Any]]:
    """What each rank printed."""
    done = launch(PROGRAM, json.dumps(GIVEN | options), ranks=ranks)
    assert done.status == 0, "\n".join(done.errors)
    return [json.loads(text) for text in done.printed]


def check(found: list[dict[str, Any]], wanted: dict[str, Any], count: int, atol: float) -> None:
    for rank, each in enumerate(found):
        island = rank * count // len(found)
        missing = len(wanted["losses"][island]) - len(each["losses"])
        assert each["losses"] == pytest.approx(wanted["losses"][island][missing:], abs=atol)
        for ours, theirs in zip(each["values"], wanted["values"][island], strict=True):
            assert ours == pytest.approx(theirs, abs=atol)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"every": 3}),  # the last two steps are each island's own
        (4, {"every": 4, "parts": 2, "plan": "tensor"}),
        (3, {"every": 2, "islands": 3, "plan": "data", "inner": "SGD"}),
    ],
)
def test_islands_train_as_in_one_process(ranks: int, options: dict[str, Any]) -> None:
    given = GIVEN | options
    check(run(ranks, **options), alone(given), given["islands"], 1e-12)


def test_meeting_after_each_step_is_data_parallelism() -> None:
    options: dict[str, Any] = {"every": 1, "inner": "SGD", "outer": {"lr": 1.0}}
    found = run(**options)
    one = alone(GIVEN | options)
    check(found, one, 2, 1e-12)
    assert one["values"][0] == one["values"][1] and found[0]["values"] == found[3]["values"]


def test_shorter_numbers_and_bytes() -> None:
    # Each rank holds half of each parameter, one of them more of an odd one. It sends the other
    # island half of what it holds, and then its half of the means.
    exact = run(every=4)
    shorter = run(every=4, dtype="bfloat16")
    for rank in range(4):
        held = {0: 4 * 5 + 4 + 2 * 7 + 2, 1: 3 * 5 + 3 + 1 * 7 + 1}[rank % 2]
        assert exact[rank]["sent"] == 2 * 2 * -(-held // 2) * 8
        assert shorter[rank]["sent"] == 2 * 2 * -(-held // 2) * 2
        for ours, theirs in zip(shorter[rank]["values"], exact[rank]["values"], strict=True):
            assert ours == pytest.approx(theirs, abs=0.01)
    assert shorter[0]["values"] == shorter[3]["values"]


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    wanted = alone(GIVEN | {"every": 3})
    check(run(every=3, save=5, folder=str(tmp_path)), wanted, 2, 1e-12)
    check(run(every=3, resume=5, folder=str(tmp_path)), wanted, 2, 1e-12)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "islands": ({"islands": 3, "every": 1}, r"4 ranks were launched.*Give one of \[1, 2, 4\]"),
    "every": ({"every": 0}, "every=0. Give 1 step or more"),
    "parts": ({"every": 2, "parts": 3}, "parts=3 with every=2"),
    "dtype": ({"every": 2, "dtype": "int8"}, "dtype=torch.int8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_raises_on_every_rank(what: str) -> None:
    options, words = WRONG[what]
    done = launch(PROGRAM, json.dumps(GIVEN | options), ranks=4)
    for error in done.errors:
        assert re.search(words, error), error


def test_one_rank_is_an_island() -> None:
    islands = consistent.islands.join(1)
    model = torch.nn.Linear(2, 2)
    outer = islands.outer(model, lambda p: torch.optim.SGD(p, lr=0.5), every=2)
    start = model.weight.detach().clone()
    for step in range(2):
        model.weight.data += 1.0
        assert outer.step() is (step == 1)
    torch.testing.assert_close(model.weight.detach(), start + 1.0)
    assert outer.sent_bytes == 0
    with pytest.raises(TypeError, match="has no length"):
        islands.part(iter([]))  # type: ignore[arg-type]
    assert list(islands.part(range(3))) == [0, 1, 2]  # type: ignore[arg-type]
