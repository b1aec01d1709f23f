"""Islands train as copies in one process do that an outer optimizer brings together."""

from __future__ import annotations

import json
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import consistent
from consistent.islands.meetings import Attendee, Meetings
from consistent.islands.outer import ExchangeResult, Outer
from mirrored.transports.torch_dist.islands import IslandConnection, IslandPosition
from tests.launch import Started, free_port, launch, of_rank
from tests.ranks import ALL

from .program import batches, model
from .reference import Run, alone, replay

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
    check(found, alone(GIVEN | options), 2, 1e-12)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for both in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        losses = [torch.nn.functional.cross_entropy(net(x), y) for x, y in both]
        (sum(losses, torch.tensor(0.0)) / 2).backward()
        optimizer.step()
    for rank in found:
        for ours, p in zip(rank["values"], net.parameters(), strict=True):
            assert ours == pytest.approx(p.flatten().tolist(), abs=1e-12)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
def test_bytes_and_how_near_values_are(dtype: str | None) -> None:
    # Each rank holds half of each parameter, one of them more of an odd one. It sends the other
    # island half of what it holds, and then its half of the means.
    options: dict[str, Any] = {"dtype": dtype} if dtype else {}
    found = run(every=4, **options)
    for rank in range(4):
        held = {0: 4 * 5 + 4 + 2 * 7 + 2, 1: 3 * 5 + 3 + 1 * 7 + 1}[rank % 2]
        numbers = -(-held // 2)
        wanted = {None: 8 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 4}[dtype]
        assert found[rank]["sent"] == 2 * 2 * wanted
    check(found, alone(GIVEN | {"every": 4}), 2, 0.01 if dtype else 1e-12)
    assert found[0]["values"] == found[3]["values"]


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    wanted = alone(GIVEN | {"every": 3})
    check(run(every=3, save=5, folder=str(tmp_path)), wanted, 2, 1e-12)
    check(run(every=3, resume=5, folder=str(tmp_path)), wanted, 2, 1e-12)


def test_what_is_wrong_raises_on_every_rank_and_a_second_model_meets_apart() -> None:
    wrong = {
        "every=0. Give 1 step or more": {"every": 0},
        "parts=3 with every=2": {"every": 2, "parts": 3},
        "dtype=torch.int16": {"every": 2, "dtype": "int16"},
        "dtype=torch.float8_e8m0fnu": {"every": 2, "dtype": "float8_e8m0fnu"},  # has no signs
        "have others. Build the same model": {"every": 2, "differs": True},
    }
    found = run(every=3, wrong=[GIVEN | each for each in wrong.values()])
    texts = [r"4 ranks were launched.*Give one of \[1, 2, 4\]", *wrong]
    for rank in found:
        for error, words in zip(rank["errors"], texts, strict=True):
            assert re.search(words, error), error
    check(found, alone(GIVEN | {"every": 3}), 2, 1e-12)


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
    """An island that is launched by itself, and what its ranks have printed."""

    def __init__(self, given: dict[str, Any], number: int, ranks: int, **options: Any) -> None:
        text, port = json.dumps(given | {"number": number} | options), free_port()
        self.number, self.is_new = number, bool(options.get("is_new"))
        self.ranks = [
            Started(
                PROGRAM.with_name("alone.py"),
                text,
                environment=of_rank(rank, ranks, port) if ranks > 1 else {},
            )
            for rank in range(ranks)
        ]

    def end(self, limit: float = 90.0) -> Run:
        """What each rank did, the same on all, once all have ended."""
        until = time.monotonic() + limit
        for each in self.ranks:
            each.wait(max(0.0, until - time.monotonic()))
        self.kill()
        rows = [[json.loads(line) for line in each.printed.splitlines()] for each in self.ranks]
        steps = min(map(len, rows))
        assert all(row[:steps] == rows[0][:steps] for row in rows), rows
        ended = all(each.status == 0 for each in self.ranks)
        assert ended or self.is_dead(), "".join(each.errors for each in self.ranks)
        told = rows[0][: steps - ended]
        run = Run(self.number, [met for _, met, _ in told], ended, self.is_new)
        run.losses = [loss for loss, _, _ in told[: len(told) - ended]]
        run.values = rows[0][-1] if ended else []
        return run

    def is_dead(self) -> bool:
        return any(each.status == -signal.SIGKILL for each in self.ranks)

    def kill(self) -> None:
        for each in self.ranks:
            each.kill()


LATE: dict[str, Any] = {"every": 2, "parts": 1, "steps": 16, "inner": "AdamW", "lr": 0.02}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"plan": None}),
        (2, {"plan": "zero3", "place": 0}),
        (2, {"plan": "tensor", "place": 1, "parts": 2}),
        *([(2, {"plan": "zero3", "place": 1, "parts": 2, "dtype": "int8"})] if ALL else []),
    ],
)
def test_an_island_that_is_late_or_dies_is_left_out_and_takes_part_again(
    ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = LATE | {"outer": NESTEROV, "count": 2, "endpoint": f"127.0.0.1:{store.port}"}
    given |= {"folder": str(tmp_path), "place": 0} | options
    # Island 1 comes to step 4 when the other has passed it, and dies in a meeting of step 8 or 9.
    first = Alone(
        given, 0, ranks, waits={0: "here 1", 5: "late", 11: "again"}, makes={0: "here 0", 4: "four"}
    )
    second = Alone(
        given, 1, ranks, waits={0: "here 0", 4: "four"}, makes={0: "here 1", 4: "late"}, dies=8
    )
    started = [first, second]
    try:
        lost = second.end()
        again = Alone(given, 1, ranks, is_new=True, makes={2: "again"})
        started.append(again)
        runs = [first.end(), lost, again.end()]
    finally:
        for each in started:
            each.kill()
    attended = [{tuple(met) for met in run.met} for run in runs]
    assert second.is_dead() and not lost.ended
    assert attended[0] - attended[1] - attended[2], "no meeting was held without island 1"
    assert runs[1].met[3] != runs[0].met[3] and runs[1].met[-1] in runs[0].met, "it was not late"
    assert runs[2].met[-1] == runs[0].met[-1] and runs[2].values == runs[0].values
    wanted = replay(given, [Run(r.island, r.met, r.ended, r.is_new) for r in runs])
    atol = 0.02 if "dtype" in given else 1e-12
    for ours, theirs in zip(runs, wanted, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, abs=atol)
        for a, b in zip(ours.values, theirs.values if ours.ended else [], strict=True):
            assert a == pytest.approx(b, abs=atol)


class _Voted(Meetings):
    """The meetings of island 0 of two, after each of which the vote has the given result."""

    def __init__(self, left: list[int]) -> None:
        self._between: Any = SimpleNamespace(count=2, number=0, place=0, store=object())
        self._wait_limit_s = self._patience = 1.0
        self._line, self._sent, self._left = None, 0, left

    def _connect(self, name: str, attendees: Any) -> Any:
        return None

    def _vote(self, name: str, attendees: Any, succeeded: bool) -> list[int] | None:
        return self._left


def test_an_exchange_that_always_fails_says_why() -> None:
    def fail(line: Any, attendees: Any) -> None:
        raise RuntimeError("no route")

    with pytest.raises(RuntimeError, match="exchanged 2 times") as raised:
        _Voted([0, 1]).hold("meeting", [Attendee(0, {}), Attendee(1, {})], fail)
    assert str(raised.value.__cause__) == "no route"


def test_an_island_that_others_did_not_wait_for_goes_on() -> None:
    assert (
        _Voted([1]).hold("meeting", [Attendee(0, {}), Attendee(1, {})], lambda *_: "means") is None
    )


def test_an_island_left_alone_in_a_meeting_holds_it_only_if_it_may() -> None:
    came = [Attendee(0, {}), Attendee(1, {})]
    for may, held in ((True, "means"), (False, None)):
        meetings, store, tries = _Voted([0]), HashStore(), iter([[0], None])
        meetings._between.store = store
        meetings._vote = lambda *_, tries=tries: next(tries)  # type: ignore[method-assign]
        asked: list[list[int]] = []

        def counts(left: list[Attendee], asked: list = asked, may: bool = may) -> bool:
            asked.append([each.island for each in left])
            return may

        store.set("meeting/members", "[0, 1]")
        assert meetings.hold("meeting", came, lambda *_: "means", counts) == held
        assert asked == [[0]] and meetings.was_held("meeting") == may


class _Ahead(_Voted):
    """Meetings with an island that is at step 14: the second of part 1 was held, not that of 0."""

    def __init__(self) -> None:
        super().__init__([])
        self.wanted: list[str] = []

    def attend(
        self, name: str, note: dict[str, Any], may_hold: Any = None
    ) -> list[Attendee] | None:
        return None if self.is_over(name) else [Attendee(0, {"digest": "", **note, "steps": 14})]

    def hold(self, name: str, attendees: Any, exchange: Any, may_hold: Any = None) -> Any:
        return {} if name == "first" else ExchangeResult({}, {}, {}, False)

    def has_begun(self, name: str) -> bool:
        return True

    def is_over(self, name: str) -> bool:
        return name == "part 1/2"

    def request_wait(self, name: str) -> None:
        self.wanted.append(name)


def test_a_part_that_is_due_while_another_one_catches_up_sees_that_it_is_late() -> None:
    meetings = _Ahead()
    outer = Outer(meetings, torch.nn.Linear(2, 2), partial(torch.optim.SGD, lr=1.0), 4, 2, None)
    late, due = outer._parts
    outer.steps, late.number, late.late, due.number = 7, 2, True, 2
    assert outer.step() and outer.steps == 14 and not late.late
    assert due.late and meetings.wanted == ["part 1/3"]


@pytest.mark.parametrize(
    ("before", "held"),
    [
        ({}, True),  # it was at all meetings so far
        ({"first": "[0]"}, False),  # it is new
        ({"part 0/1": "[0]"}, False),  # it has missed one
        ({"part 0/1": "[]"}, True),  # nobody has held that one
    ],
)
def test_an_island_alone_holds_a_meeting_only_with_what_all_have_reached(
    before: dict[str, str], held: bool
) -> None:
    store = HashStore()
    for name, members in before.items():
        store.set(f"test/{name}/members", members)
    meetings = Meetings(IslandPosition(1, 2, store=store, timeout_s=1.0), 0.01, "test")
    model = torch.nn.Linear(2, 2)
    outer = Outer(meetings, model, partial(torch.optim.SGD, lr=0.5), 1, 1, None)
    start = model.weight.detach().clone()
    model.weight.data += 1.0
    missed = len([name for name in before if name.startswith("part")])
    assert [outer.step() for _ in range(missed + 1)] == [False] * missed + [held]
    torch.testing.assert_close(model.weight.detach(), start + (0.5 if held else 1.0))
    assert outer._parts[0].is_new == ("first" in before)


class _Fives(IslandConnection):
    """A connection to an island that holds fives."""

    def __init__(self) -> None:
        super().__init__(0, 2, None)

    def broadcast(self, x: torch.Tensor, at: int) -> None:
        if x.is_floating_point():
            x.fill_(5.0)


def test_an_exchange_that_is_repeated_counts_from_the_same_start() -> None:
    outer = consistent.islands.join(1).outer(
        torch.nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.5), every=2
    )
    came = [
        Attendee(0, {"met": 1, "new": False, "ends": False}),
        Attendee(1, {"met": 3, "new": False, "ends": False}),
    ]
    first, second = (outer._exchange(outer._parts[0], _Fives(), came) for _ in range(2))
    for name, mean in first.means.items():
        assert torch.equal(mean, torch.zeros_like(mean)) and torch.equal(mean, second.means[name])
        assert (first.starts[name] == 5.0).all() and (outer._start[name] != 5.0).all()
