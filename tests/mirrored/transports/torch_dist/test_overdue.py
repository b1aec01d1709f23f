"""A GPU that waits for a rank in vain is let out of it: with events and groups of NCCL that only
note what is asked of them. On GPUs: tests/gpu/elastic.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from mirrored.transports.torch_dist.overdue import OverdueWatcher

LIMIT_S = 0.4


class Watch:
    """Of a rank: what it gives up with is what all raise."""

    def __init__(self) -> None:
        self.alarm = SimpleNamespace(words=None)
        self.gave_up = threading.Event()

    def give_up(self, why: str) -> str:
        self.alarm.words = why
        self.gave_up.set()
        return why

    def check(self) -> None:
        if self.alarm.words is not None:
            raise RuntimeError(self.alarm.words)


class Group:
    """Of NCCL. Its end waits until ``others`` are being ended too, as that of a communicator waits
    for all that is on the GPU."""

    def __init__(self, others: threading.Barrier | None = None) -> None:
        self.others, self.said, self.error = others, [], ErrorType.SUCCESS

    def abort(self) -> None:
        if self.others is not None:
            self.others.wait(5.0)
        self.said.append("abort")

    def shutdown(self) -> None:
        self.said.append("shutdown")

    def get_error(self) -> ErrorType:
        return self.error

    def _set_default_timeout(self, timeout: Any) -> None:
        self.timeout = timeout


class Event:
    """In a stream of the GPU, which has passed it or not."""

    passed = True  # for those that are recorded from now on

    def record(self) -> None:
        self.has_passed = Event.passed

    def query(self) -> bool:
        return self.has_passed


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "passed", True)
    yield


def started(*groups: Group) -> tuple[OverdueWatcher, Any]:
    watch: Any = Watch()
    return OverdueWatcher(3, watch, lambda: list(groups), LIMIT_S), watch


def test_a_message_that_does_not_arrive_is_given_up_and_all_groups_end_at_once(monkeypatch):
    others = threading.Barrier(3)
    groups = [Group(others) for _ in range(3)]
    overdue, watch = started(*groups)
    assert all(group.timeout.total_seconds() > LIMIT_S for group in groups)
    monkeypatch.setattr(Event, "passed", False)
    began = time.monotonic()
    overdue.record_message()
    assert watch.gave_up.wait(10.0)
    assert time.monotonic() - began >= LIMIT_S
    assert watch.alarm.words.startswith("rank 3 has waited 0.")
    assert watch.alarm.words.endswith(" s for messages to its GPU")
    overdue.close()
    assert [group.said for group in groups] == [["abort"]] * 3


def test_a_message_counts_from_when_the_gpu_was_given_it(monkeypatch):
    overdue, watch = started(Group())
    for _ in range(6):  # longer than the limit in all, but each has passed soon
        overdue.record_message()
        assert not watch.gave_up.wait(LIMIT_S / 4)
    monkeypatch.setattr(Event, "passed", False)
    overdue.record_message()
    assert not watch.gave_up.wait(LIMIT_S / 2)
    assert watch.gave_up.wait(10.0)


def test_messages_of_a_graph_that_is_captured_are_not_asked_for(monkeypatch):
    overdue, watch = started(Group())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Event, "passed", False)
    overdue.record_message()
    assert not watch.gave_up.wait(1.5 * LIMIT_S)
    overdue.close()


def test_the_newest_message_of_each_thread_is_looked_at(monkeypatch):
    overdue, watch = started(Group())
    monkeypatch.setattr(Event, "passed", False)
    thread = threading.Thread(target=overdue.record_message)  # as one that sends beside compute
    thread.start()
    thread.join()
    monkeypatch.setattr(Event, "passed", True)
    while not watch.gave_up.is_set():
        overdue.record_message()
        time.sleep(0.01)


def test_nothing_is_made_of_what_a_message_did_not_fill():
    groups = Group(), Group()
    overdue, watch = started(*groups)
    overdue.finish()
    groups[1].error = ErrorType.TIMEOUT
    with pytest.raises(RuntimeError, match="rank 3: NCCL broke off a message .TIMEOUT"):
        overdue.finish()
    groups[1].error = ErrorType.SUCCESS
    with pytest.raises(RuntimeError, match="broke off"):  # the alarm has gone off
        overdue.finish()
    overdue.close()


def test_groups_of_a_sound_world_end_in_order():
    first, own = Group(), Group()
    overdue, _ = started(first, own)
    overdue.close()
    assert (first.said, own.said) == ([], ["shutdown"])  # torch ends the first


def test_what_is_broken_off_is_so_once():
    groups = Group(), Group()
    overdue, watch = started(*groups)
    watch.alarm.words = "rank 1 was killed"
    overdue.break_off()
    overdue.break_off()
    overdue.close()
    assert [group.said for group in groups] == [["abort"]] * 2
