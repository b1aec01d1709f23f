"""Detects, from a thread's stack, which signal handler the thread is running."""

from __future__ import annotations

import functools
import signal
import sys
from types import CodeType, FrameType
from typing import Any

from .place import describe_place


def refuse_in_handler(what: str) -> None:
    """Raise RuntimeError if this thread is running a signal handler, which must not communicate.

    ``what`` is the name of the refused function, for the message.
    """
    handler = handler_under_way()
    if handler:
        raise RuntimeError(
            f"{what} is called by the handler of {handler}.\n"
            f"    {describe_place()}\n"
            "  It communicates, and a handler runs between any two instructions: other ranks are "
            "elsewhere, and this one may be in the middle of a step.\n"
            "  Use due = consistent.checkpoint.on_signal(...), and save after a step if due()."
        )


def handler_under_way() -> str:
    """Return the name of the signal whose handler this thread is running; "" if none."""
    codes = {}
    for number in signal.valid_signals():
        code = _code_of(signal.getsignal(number))
        if code is not None:
            codes[code] = _signal_name(number)
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in codes and _is_called_by_signal(frame):
            return codes[frame.f_code]
        frame = frame.f_back
    return ""


def _is_called_by_signal(frame: FrameType) -> bool:
    """Return whether ``frame`` runs a handler that a signal called, and not the program itself.

    Python passes a handler the interrupted frame, and that is also the caller of ``frame``.
    """
    code, frame_locals = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount]
    values = [frame_locals.get(name) for name in names]
    if code.co_flags & 0x04:  # *args
        values += frame_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(value is frame.f_back for value in values)


def _code_of(handler: Any) -> CodeType | None:
    # A handler may be a function, a bound method, a partial or a callable object.
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = getattr(handler, "__call__", None)  # noqa: B004 - an object with that method
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # between SIGRTMIN and SIGRTMAX
        return f"signal {int(number)}"
