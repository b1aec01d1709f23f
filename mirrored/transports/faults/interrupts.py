"""A rank that Ctrl-C interrupts, and whose program goes on, takes no number of another step.

Where it goes on, nobody knows: the others may be in the middle of the step that it has left, and
what it sends next may look like what they wait for. So from then on its messages fit those of no
other rank, be it interrupted, too, until there is another process group. At an idle prompt no code
runs, and Ctrl-C is not an interrupt.
"""

from __future__ import annotations

import secrets
import signal
import threading
from types import FrameType
from typing import Any

from .. import failures

_BITS = 40  # two ranks that are interrupted hardly ever draw the same number


def begin() -> None:
    """Watch for interrupts, unless the program handles them in its own way."""
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def is_default(handler: Any) -> bool:
    """Whether a handler of SIGINT is Python's own, or that of this module, which calls it."""
    return handler in (signal.default_int_handler, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if frame is not None:
        failures.add(1 + secrets.randbits(_BITS))
    signal.default_int_handler(number, frame)
