"""No order in which GPUs run the moves over symmetric memory makes one read what it should not, and
each thing that the protocol relies on is missed where it is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mirrored.transports.symmetric_memory.device_moves import DeviceMoves
from tests.mirrored.transports.symmetric_memory.noted_moves import MOVES, Noted, programs
from tests.mirrored.transports.symmetric_memory.search import Fault, Meeting, Search
from tests.ranks import ALL

BEFORE = "what was there before"
BOTH = ("program", "side")  # streams, in turn


def after_and_before(move: str) -> list[Sequence[str]]:
    """Moves in which each use of a slot has another before and after it."""
    return [(move, other, move) for other in MOVES]


@pytest.mark.parametrize("move", MOVES)
def test_two_ranks_read_what_each_call_means(move: str) -> None:
    for moves in after_and_before(move):
        for streams in (BOTH[:1], BOTH):
            assert Search(programs(moves, 2, streams)).run() > 40


@pytest.mark.parametrize("move", MOVES if ALL else ["all-reduce"])
def test_three_ranks_read_what_each_call_means(move: str) -> None:
    for moves in after_and_before(move) if ALL else [(move, "broadcast", "short all-reduce")]:
        assert Search(programs(moves, 3, BOTH)).run() > 1000


class OneSlot(DeviceMoves):
    """Writes its slot again in the next step."""

    def _next_slots(self) -> list[Any]:
        return self._slots[0]


class NoBarrier(Noted):
    def barrier(self, timeout_s: float) -> None:
        pass


class NoSecondBarrier(Noted):
    """An all-reduce in two steps has one barrier."""

    count = 0

    def barrier(self, timeout_s: float) -> None:
        self.count += 1
        if self.count % 2:
            super().barrier(timeout_s)


class NoBegin(Noted):
    """A step does not wait for the last one on the other stream."""

    def begin(self) -> None:
        pass


FAULTS: dict[str, tuple[Sequence[str], type[Noted], dict[str, bool], str]] = {
    "the barrier's put does not release": (
        ("peers",), Noted, {"releases": False}, BEFORE,
    ),
    "the barrier's take does not acquire": (
        ("peers",), Noted, {"acquires": False}, BEFORE,
    ),
    "no barrier": (("peers",), NoBarrier, {}, BEFORE),
    "no barrier between the two steps of an all-reduce": (
        ("all-reduce",), NoSecondBarrier, {}, BEFORE,
    ),
    "streams do not wait": (("peers",) * 3, NoBegin, {}, "reads slot"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_taken_away_is_missed(fault: str, ranks: int) -> None:
    moves, kind, without, why = FAULTS[fault]
    with pytest.raises(Fault, match=why):
        Search(programs(moves, ranks, BOTH, kind), **without).run()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slot_that_is_used_again_too_early_is_seen(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMoves, "_next_slots", OneSlot._next_slots)
    with pytest.raises(Fault, match="reads slot"):
        Search(programs(["peers"] * 2, ranks)).run()


def test_without_a_meeting_a_gpu_waits_for_a_rank_that_has_ended() -> None:
    first, second = programs(["peers"] * 3, 2)
    meetings = [k for k, each in enumerate(second) if isinstance(each, Meeting)]
    ended = second[: meetings[1]]  # after its first call
    Search([first, ended]).run()
    with pytest.raises(Fault, match=r"ranks \[0\] wait for ever"):
        Search([first, ended], meets=False).run()


def test_without_a_meeting_calls_that_do_not_fit_read_each_others_tensors() -> None:
    (gathers, _), (_, sums) = programs(["all-gather"], 2), programs(["short all-reduce"], 2)
    Search([gathers, sums]).run()
    with pytest.raises(Fault, match="of another call"):
        Search([gathers, sums], meets=False).run()
