"""Keeps a rank that Ctrl-C interrupts from exchanging wrong values if its program goes on.

Nobody knows where the program of an interrupted rank continues: the other ranks may be in the
middle of the step that it has left, and what it sends next may look like what they wait for. So an
interrupt adds a random number to this process's count of failures (``failures.py``), which is part
of each message. From then on the messages match those of no other rank, interrupted or not, until
there is another process group. At an idle prompt no code runs, and Ctrl-C does not count.
"""

from __future__ import annotations

import secrets
import signal
import threading
from types import FrameType
from typing import Any

from .. import failures

_RANDOM_BITS = 40  # two ranks that are interrupted hardly ever draw the same number


def install_handler() -> None:
    """Install this module's SIGINT handler, unless the program has a handler of its own.

    It does nothing outside the main thread.
    """
    # Python allows `signal.signal` in the main thread only.
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def is_default(handler: Any) -> bool:
    """Return whether a SIGINT handler is Python's own, or this module's, which calls it."""
    return handler in (signal.default_int_handler, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if frame is not None:
        # At least 1, so that the count changes even if the random number is 0.
        failures.add_failures(1 + secrets.randbits(_RANDOM_BITS))
    signal.default_int_handler(number, frame)
