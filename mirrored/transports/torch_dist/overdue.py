"""Detects NCCL messages that do not arrive, for processes that go on when a rank is lost.

```
program   message | ......... message | ... reads the loss: waits for the GPU
GPU         message, event ...  message ............................. is released, goes on
a thread        looks: the event has passed ...  it has not, for longer than the limit: gives up
```

A GPU that waits for a lost rank is released from NCCL's kernel (``break_off``), and goes on with
undefined values. They are never used: by then the error that every later call raises has been set,
and ``finish`` raises it.

NCCL's own watchdog is no replacement: it waits a minute for a dump, ends the process, and notifies
no other rank. It is configured to abort broken communicators at once, and to leave the process
running.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..faults.watch import Watch

_PAUSE_S = 0.1
_NCCL_GRACE_S = 60.0  # NCCL's own timeout comes this much later than ours
# NCCL reads these when a group is made. Without them, a rank that others reach by network and not
# by memory would end their processes with its own: their watchdogs see the connection end.
_WATCHDOG_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up, and leave the process alone
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # before it cleans up it waits four times as long
}


def tame_watchdog() -> None:
    """Make NCCL's watchdog clean up after an error without ending this process.

    It sets environment variables, which apply to process groups made after the call.
    """
    os.environ.update(_WATCHDOG_SETTINGS)


class OverdueWatcher:
    """Thread that makes all ranks raise if a message to this rank's GPU does not arrive in time.

    Args:
        rank: this rank.
        watch: makes all ranks raise.
        groups: returns the NCCL groups that exist now; the first is the default process group's.
        limit_s: seconds after which a message is overdue.
    """

    def __init__(
        self, rank: int, watch: Watch, groups: Callable[[], list[Any]], limit_s: float
    ) -> None:
        self._rank, self._watch, self._groups, self._limit_s = rank, watch, groups, limit_s
        for group in groups():  # groups made later get the timeout of the first
            group._set_default_timeout(timedelta(seconds=limit_s + _NCCL_GRACE_S))
        self._newest_events: dict[int, tuple[float, Any]] = {}  # by thread: time, event
        self._abort_lock = threading.RLock()
        self._aborts: list[threading.Thread] = []
        self._end_event = threading.Event()
        threading.Thread(target=self._watch_events, name="mirrored overdue", daemon=True).start()

    def record_message(self) -> None:
        """Record an event on the current stream, for which a message has just been started.

        If the GPU does not reach the event in time, the message is overdue, and all ranks raise.
        """
        if torch.cuda.is_current_stream_capturing():  # an event in a CUDA graph cannot be queried
            return
        event = torch.cuda.Event()
        event.record()
        self._newest_events[threading.get_ident()] = time.monotonic(), event

    def finish(self) -> None:
        """Wait until this rank's GPU has done all its work.

        Raises RuntimeError if a message was broken off meanwhile, so that tensors have undefined
        values.
        """
        torch.cuda.synchronize()
        self._watch.check()
        for group in self._groups():
            error = group.get_error()
            if error.name != "SUCCESS":
                why = f"rank {self._rank}: NCCL broke off a message ({error.name})"
                raise RuntimeError(self._watch.give_up(why))

    def break_off(self) -> None:
        """Release this rank's GPU from messages that will not arrive.

        Any thread may call it, once the error that this rank raises has been set.
        """
        self._end_event.set()
        with self._abort_lock:
            # In parallel: aborting one communicator waits for all work on the GPU, and that may
            # hang in a message of another one.
            for group in [] if self._aborts else self._groups():
                thread = threading.Thread(target=group.abort, daemon=True)
                thread.start()
                self._aborts.append(thread)

    def close(self) -> None:
        """Close the NCCL groups at the end of the process group.

        If a rank was lost, they are aborted, and the other ranks are not notified.
        """
        self._end_event.set()
        if self._watch.alarm.words is not None:
            self.break_off()
            for thread in self._aborts:
                thread.join(self._limit_s)
        else:
            for group in self._groups()[1:]:  # torch shuts down the first
                group.shutdown()

    def _watch_events(self) -> None:
        oldest: dict[int, tuple[float, Any]] = {}  # by thread: not reached at the last look
        while not self._end_event.wait(_PAUSE_S):
            for thread, newest in list(self._newest_events.items()):
                # Keep the same event until the GPU reaches it: newer ones would restart the time.
                since, event = oldest.setdefault(thread, newest)
                waited = time.monotonic() - since
                if event.query():
                    del oldest[thread]
                elif waited > self._limit_s:
                    why = f"rank {self._rank} has waited {waited:.1f} s for messages to its GPU"
                    self._watch.give_up(why)
                    self.break_off()
                    return
