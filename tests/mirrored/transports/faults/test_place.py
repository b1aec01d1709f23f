"""A thread is in the program's own line, whatever library it is in."""

from __future__ import annotations

import inspect
import json
import threading

import pytest

from mirrored.transports.faults import place
from mirrored.transports.faults.place import describe_place


def here() -> int:
    """The line of who calls."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_own_line() -> None:
    assert describe_place() == f"{__file__}:{here()} in test_own_line"


def test_the_line_that_called_torch_or_python() -> None:
    found = []

    def hook(made: dict) -> None:
        # Without this function and `_frames_of` itself, as if Python's own code asked.
        found.append(place._user_line(place._frames_of(threading.get_ident())[2:]))

    json.loads("{}", object_hook=hook)
    assert found == [f"{__file__}:{here() - 1} in test_the_line_that_called_torch_or_python"]


def test_another_thread_and_one_of_the_librarys_own() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert describe_place(thread.ident).endswith(" in wait")
    end.set()
    thread.join()
    gone = describe_place(thread.ident)  # it works for the main thread
    assert gone == f"{__file__}:{here() - 1} in test_another_thread_and_one_of_the_librarys_own"


def test_what_the_library_does_is_said_by_who_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_describe", lambda frames: f"{len(frames) > 1}")
    assert describe_place() == f"{__file__}:{here()} in {inspect.stack()[0].function}, True"


def test_a_description_that_fails_does_not_hide_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_describe", lambda frames: 1 // 0)
    found = describe_place()
    assert found.startswith(f"{__file__}:{here() - 1} in test_a_description")
    assert found.endswith("in an op that could not be read: ZeroDivisionError")
