"""Describes where a thread of this process is: the user's own line, and the library's op.

The thread's stack is read when another rank asks, so nothing is recorded while all is well.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from ...readable import on_one_line

_LIBRARY_PACKAGES = ("consistent", "mirrored", "torch")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

Frames = Sequence[FrameType]  # of one thread, the innermost first

# Frames -> what the library does in them, such as "add, P -> B"; "" if nothing. The package that
# has ops sets this, because mirrored/ must not import it.
_describe: Callable[[Frames], str] | None = None


def register_description(describe: Callable[[Frames], str]) -> None:
    """Register the function that describes what the library does in a thread.

    ``describe(frames)`` gets the thread's frames, the innermost first, and returns a text such as
    ``"add, P -> B"``, or "". The package that has ops calls this when it is imported.
    """
    global _describe
    _describe = describe


def describe_place(thread: int | None = None) -> str:
    """Return where a thread (its ident; by default the calling one) is, for error messages.

    For example ``train.py:12 in step, add, P -> B``: the innermost line of the user's program, and
    what the library does there.
    """
    frames = _frames_of(threading.get_ident() if thread is None else thread)
    description = _description(frames)
    line = _user_line(frames)
    if not line:  # a thread of the library, which works for the main thread
        line = _user_line(_frames_of(threading.main_thread().ident))
    return ", ".join(filter(None, (line or "in no line of the program", description)))


def user_line() -> str:
    """Return ``file:line in function`` of the calling thread's innermost frame in user code.

    The result is "" if no frame is the user's.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            return line_of_frame(frame)
        frame = frame.f_back
    return ""


def _description(frames: Frames) -> str:
    try:
        return _describe(frames) if _describe is not None else ""
    except Exception as error:  # noqa: BLE001 - the thread of these frames runs on meanwhile
        return f"in an op that could not be read: {type(error).__name__}"


def line_of_frame(frame: FrameType, line: int | None = None) -> str:
    """Return ``file:line in function`` of a frame; ``line`` replaces the frame's present line."""
    code = frame.f_code
    return f"{on_one_line(code.co_filename)}:{line or frame.f_lineno} in {code.co_name}"


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame runs code of the program, not of this library, torch or Python."""
    name = frame.f_code.co_filename
    is_library = frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARY_PACKAGES
    # Usually these folders are inside the standard library's folder.
    is_installed = "site-packages" in name or "dist-packages" in name
    return (
        not is_library
        and not name.startswith(("<frozen", "<eval_with_key"))  # the second is torch.fx's own
        and (is_installed or not name.startswith(_STANDARD_LIBRARY))
    )


def _frames_of(thread: int | None) -> list[FrameType]:
    frame = sys._current_frames().get(thread) if thread is not None else None
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _user_line(frames: Frames) -> str:
    return next((line_of_frame(frame) for frame in frames if is_user_frame(frame)), "")
