"""Messages of NCCL that do not arrive, where processes go on without a rank that is lost.

```
program   message | ......... message | ... reads the loss: waits for the GPU
GPU         message, event ...  message ............................. is let out, goes on
a thread        looks: the event has passed ...  it has not, for longer than the limit: gives up
```

A GPU that waits for a rank that is gone is let out of NCCL's kernel (``break_off``), and goes on
with undefined values. Nothing is made of them: the words that every later call raises are there
before, and ``finish`` raises them.

NCCL's own watchdog does not serve: it waits a minute for a dump, ends the process, and tells no
other rank. It is told to break off what it finds broken, at once, and to leave the process alone.
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
_LATER_S = 60.0  # than this: NCCL's watchdog
# Read where a group of NCCL is made. Without them a rank that others reach by a network, and not by
# memory, would take them with it: the watchdog sees the connection end.
_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up, and leave the process alone
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # before it cleans up it waits four times as long
}


def tame_watchdog() -> None:
    """Let NCCL's watchdog leave this process alone; for groups that are made from here on."""
    os.environ.update(_WATCHDOG)


class Overdue:
    """Looks, in a thread, how far the GPU has come with the messages of this rank.

    Args:
        rank: this one.
        watch: gives up.
        groups: those of NCCL that there are now; first that of the default process group.
        limit_s: seconds after which a message is overdue.
    """

    def __init__(
        self, rank: int, watch: Watch, groups: Callable[[], list[Any]], limit_s: float
    ) -> None:
        self._rank, self._watch, self._groups, self._limit_s = rank, watch, groups, limit_s
        for group in groups():  # those that are made later get the timeout of the first
            group._set_default_timeout(timedelta(seconds=limit_s + _LATER_S))
        self._newest: dict[int, tuple[float, Any]] = {}  # by thread: each has a stream of its own
        self._breaking_off = threading.RLock()
        self._aborts: list[threading.Thread] = []
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="mirrored overdue", daemon=True).start()

    def passed(self) -> None:
        """From here on the current stream waits for a message."""
        if torch.cuda.is_current_stream_capturing():  # nobody may ask for an event of a graph
            return
        event = torch.cuda.Event()
        event.record()
        self._newest[threading.get_ident()] = time.monotonic(), event

    def finish(self) -> None:
        """Wait until this rank's GPU has done all that it was given. Raises RuntimeError if a
        message was broken off meanwhile, so that tensors have undefined values."""
        torch.cuda.synchronize()
        self._watch.check()
        for group in self._groups():
            error = group.get_error()
            if error.name != "SUCCESS":
                why = f"rank {self._rank}: NCCL broke off a message ({error.name})"
                raise RuntimeError(self._watch.give_up(why))

    def break_off(self) -> None:
        """Let this rank's GPU come out of messages that will not arrive. Any thread may call it,
        once the words that this rank raises are there."""
        self._ended.set()
        with self._breaking_off:
            # All at once: the end of one communicator waits for everything on the GPU, and that may
            # be in a message of another one.
            for group in [] if self._aborts else self._groups():
                thread = threading.Thread(target=group.abort, daemon=True)
                thread.start()
                self._aborts.append(thread)

    def close(self) -> None:
        """Let go of NCCL's groups; where a rank is lost, without a word to the others."""
        self._ended.set()
        if self._watch.alarm.words is not None:
            self.break_off()
            for thread in self._aborts:
                thread.join(self._limit_s)
        else:
            for group in self._groups()[1:]:  # torch ends the first
                group.shutdown()

    def _look(self) -> None:
        oldest: dict[int, tuple[float, Any]] = {}  # which the GPU had not passed at the last look
        while not self._ended.wait(_PAUSE_S):
            for thread, newest in list(self._newest.items()):
                since, event = oldest.setdefault(thread, newest)
                waited = time.monotonic() - since
                if event.query():
                    del oldest[thread]
                elif waited > self._limit_s:
                    why = f"rank {self._rank} has waited {waited:.1f} s for messages to its GPU"
                    self._watch.give_up(why)
                    self.break_off()
                    return
