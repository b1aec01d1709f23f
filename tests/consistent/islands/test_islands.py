"""Islands train as copies in one process do that an outer optimizer brings together."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import consistent
from consistent.islands.meetings import Came, Meetings
from tests.launch import Started, launch

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


class Alone:
    """An island that is launched by itself, and what it has printed."""

    def __init__(self, folder: Path, number: int, port: int, **options: Any) -> None:
        given = {"number": number, "count": 3, "endpoint": f"127.0.0.1:{port}"}
        text = json.dumps(given | {"folder": str(folder)} | options)
        self.started = Started(PROGRAM.with_name("alone.py"), text)

    @property
    def lines(self) -> list[str]:
        """Those that have come to their end."""
        return [
            each for each in self.started.printed.splitlines(keepends=True) if each.endswith("\n")
        ]

    def meetings(self) -> list[int]:
        """Numbers of the parameters after each meeting with others."""
        rows = [json.loads(line) for line in self.lines if line.startswith(("[true", "[false"))]
        return [number for met, number in rows if met]

    def end(self) -> list[str]:
        self.started.wait(60)
        return self.lines


def test_islands_that_are_lost_or_late_are_left_out_and_one_that_comes_again_takes_part(
    tmp_path: Path,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = Alone(tmp_path, 0, store.port)
    second = Alone(tmp_path, 1, store.port, sleeps=10)
    third = Alone(tmp_path, 2, store.port, dies=6)
    started = [first, second, third]
    try:
        until(lambda: third.started.status == 1, first)  # in the third meeting
        until(lambda: len(first.meetings()) >= 5, first)
        until(lambda: not json.loads(second.lines[9])[0], second)  # the fifth was held without it
        again = Alone(tmp_path, 2, store.port)
        started.append(again)
        until(lambda: len(again.meetings()) >= 2, again)
        until(lambda: second.meetings()[-1] in first.meetings()[6:], second)
        (tmp_path / "stop").touch()
        ends = [each.end()[-1] for each in (first, second, again)]
    finally:
        for each in started:
            each.started.kill()
    assert ends[0] == ends[1] == ends[2]
    ours, theirs, news = first.meetings(), second.meetings(), again.meetings()
    assert theirs[:4] == ours[:4] and ours[4] not in theirs
    assert set(theirs) <= set(ours) and set(news) <= set(ours)


def until(ready: Callable[[], bool], of: Alone, limit: float = 90.0) -> None:
    end = time.monotonic() + limit
    while True:
        with contextlib.suppress(IndexError):
            if ready():
                return
        if time.monotonic() > end or of.started.status not in (None, 1):
            of.started.kill()
            raise AssertionError("".join([*of.lines, of.started.errors]))
        time.sleep(0.02)


class _StillThere(Meetings):
    """The meetings of one of two islands, both of which are there whatever fails."""

    def __init__(self) -> None:
        self._between: Any = SimpleNamespace(count=2, number=0, place=0, store=object())
        self._patience, self._line, self._sent = 1.0, None, 0

    def _line_of(self, name: str, came: Any) -> Any:
        return None

    def _vote(self, name: str, came: Any, well: bool) -> list[int] | None:
        return [0, 1]


def test_an_exchange_that_always_fails_says_why() -> None:
    def fail(line: Any, came: Any) -> None:
        raise RuntimeError("no route")

    with pytest.raises(RuntimeError, match="exchanged 2 times") as raised:
        _StillThere().hold("meeting", [Came(0, {}), Came(1, {})], fail)
    assert str(raised.value.__cause__) == "no route"
