"""Measures how long this rank waits in calls that communicate, by a wrapper around a transport.

So a slow rank can be told from ranks that wait for it (``consistent/elastic/slow.py``).
"""

from __future__ import annotations

import time
from typing import Any

from ..comm import Handle, Transport
from .base.wrapper import Wrapper

_STARTING_METHODS = (  # methods that start an operation and return a handle
    "all_reduce_async", "send", "receive", "start_all_gather_several",
    "start_reduce_scatter_several", "start_all_to_all",
)  # fmt: skip


class TimedTransport(Wrapper):
    """Wrapper that times every call and passes it on to ``inner``.

    Attributes:
        seconds: total time that this rank spent in calls, and in ``wait()`` of the handles that
            calls returned.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.seconds = 0.0

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``name`` of ``inner``, and add its duration to ``seconds``."""
        begin = time.perf_counter()
        try:
            result = super().pass_on(name, *args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin
        return _TimedHandle(result, self) if name in _STARTING_METHODS else result


class _TimedHandle:
    """Handle that adds the time spent in ``wait()`` to ``timer.seconds``."""

    def __init__(self, handle: Handle, timer: TimedTransport) -> None:
        self._handle, self._timer = handle, timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def wait(self) -> Any:
        begin = time.perf_counter()
        try:
            return self._handle.wait()
        finally:
            self._timer.seconds += time.perf_counter() - begin
