"""What is asked of streams for a message beside the program's work, with streams that only note."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirrored import current
from mirrored.background import BackgroundCalls
from mirrored.transports import side_stream
from mirrored.transports.ordered import Ordered
from mirrored.transports.side_stream import SideStreamMessage

GPU = torch.device("cuda", 0)


class Stream:
    """Notes what is asked of it in ``log``."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self._events = name, log, 0

    def record_event(self) -> str:
        self._events += 1
        event = f"{self.name} {self._events}"
        self._log.append(f"{self.name}: record {event}")
        return event

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name}: wait for {event}")


class Held:
    """A tensor in the memory of a GPU."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.device, self._log = name, GPU, log

    def record_stream(self, stream: Stream) -> None:
        self._log.append(f"{self.name} is held for {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    noted: list[str] = []
    program, now = Stream("program", noted), threading.local()

    @contextmanager
    def stream(side: Stream) -> Iterator[None]:
        now.stream = side
        try:
            yield
        finally:
            del now.stream

    @contextmanager
    def device(given: torch.device) -> Iterator[None]:
        yield

    fake = SimpleNamespace(
        current_stream=lambda given: getattr(now, "stream", program),
        Stream=lambda given, priority: Stream("side", noted),
        is_initialized=lambda: True,
        stream=stream,
        device=device,
    )
    monkeypatch.setattr(side_stream, "cuda", fake)
    monkeypatch.setattr(side_stream, "_streams", {})
    yield noted


def send(log: list[str]) -> Any:
    def run(xs: list[Any]) -> list[Any]:
        log.append(f"{side_stream.cuda.current_stream(GPU).name}: send {xs[0].name}")
        return [Held(f"sum of {xs[0].name}", log)]

    return run


def in_a_thread(beside: SideStreamMessage, run: Any, xs: list[Any]) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(beside.run(run, xs)))
    thread.start()
    thread.join()
    return found


def test_each_stream_waits_for_what_the_other_made(log: list[str]) -> None:
    x: Any = Held("x", log)
    beside = SideStreamMessage.for_tensors([x])
    assert beside is not None
    made = in_a_thread(beside, send(log), [x])
    beside.join(made)
    assert log == [
        "program: record program 1",
        "side: wait for program 1",
        "side: send x",
        "x is held for side",
        "side: record side 1",
        "program: wait for side 1",
        "sum of x is held for program",
    ]


def test_messages_of_a_device_share_a_stream(log: list[str]) -> None:
    for name in ("x", "y"):
        x: Any = Held(name, log)
        beside = SideStreamMessage.for_tensors([x])
        assert beside is not None
        in_a_thread(beside, send(log), [x])
    assert [line for line in log if line.startswith("side: record")] == [
        "side: record side 1",
        "side: record side 2",
    ]


def test_a_message_that_fails_is_not_waited_for(log: list[str]) -> None:
    x: Any = Held("x", log)
    beside = SideStreamMessage.for_tensors([x])
    assert beside is not None

    def fail(xs: list[Any]) -> list[Any]:
        raise RuntimeError("a rank has ended")

    with pytest.raises(RuntimeError, match="a rank has ended"):
        beside.run(fail, [x])
    beside.join()
    assert log == ["program: record program 1", "side: wait for program 1"]


def test_main_memory_needs_no_stream(log: list[str]) -> None:
    assert SideStreamMessage.for_tensors([torch.ones(2)]) is None and not log


@pytest.mark.parametrize("thread", ["background", "ordered"])
def test_a_thread_uses_the_stream_of_its_caller(log: list[str], thread: str) -> None:
    def where() -> str:
        return side_stream.cuda.current_stream(None).name

    own = Stream("the caller's own", log)
    with BackgroundCalls() as background:
        calls = background if thread == "background" else Ordered(current())
        with side_stream.cuda.stream(own):
            inside = calls.submit(where)
        outside = calls.submit(where)
        assert (inside.result(), outside.result()) == ("the caller's own", "program")
