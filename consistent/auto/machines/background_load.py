"""Background processes that keep the other cores of the host busy while a call is timed.

A training job runs one rank per core or group of cores, so a call must be timed while other
processes make it at the same time. They also make the fixed calls by which the present speed of the
host is measured (``host_speed.py``).

```
this process   requests   times the call                      requests   times the next call
the others                make the call repeatedly until the next request
```

Ranks that are busy at the same time share the host's memory, and some of its caches: of two ranks
that copy large tensors, each may be half as fast as one alone. One helper is started, which forks
the others, so they share its code. They sleep while there is no request, and end after a while
without requests, or with this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from . import replay
from .host_speed import fixed_calls
from .op_signature import OpSignature

MAX_PROCESSES = 15  # background processes; more would not change the measured times
IDLE_S = 60.0  # without a request, after which the processes end
STARTING_S = 60.0
STARTED, FAILED = True, False  # the answers of a helper
Request = tuple[OpSignature | None, bool]  # (call or None for the fixed calls, cold)
_PAUSE_S = 1e-4  # seconds of calls between two checks for the next request
_MAIN = "from consistent.auto.machines.background_load import helper; helper()"


class BackgroundLoad:
    """Pool of ``others`` background processes that make a call while this process times it.

    A rank of a training job shares the host with other busy ranks, and so must a timed call. If
    ``others`` is 0, or if the processes cannot be started, this process makes calls alone.
    """

    def __init__(self, others: int) -> None:
        self._count = min(others, MAX_PROCESSES)
        self.ranks = others + 1
        self._links: list[Connection] = []
        self._last_request_at = 0.0
        self._end_processes: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def while_making(self, call: OpSignature | None, cold: bool = False) -> Iterator[int]:
        """Let the other processes make ``call`` inside the block, and yield how many of them do.

        Args:
            call: the call to make; None: the fixed calls of ``host_speed.py``, which measure the
                host.
            cold: whether the other processes make the call on tensors that are in no cache (see
                ``replay.replay_function``).
        """
        self._ensure_running()
        self._send_request((call, cold))
        try:
            yield sum(map(_has_begun, self._links))
        finally:
            self._send_request(None)
            self._last_request_at = time.monotonic()

    def end(self) -> None:
        """End the other processes; the next call starts new ones."""
        self._end_processes()
        self._links = []

    def _send_request(self, request: Request | None) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(request)

    def _ensure_running(self) -> None:
        # Half of IDLE_S, so that helpers which are about to end are not used.
        if self._links and time.monotonic() - self._last_request_at < IDLE_S / 2:
            return
        self.end()
        pairs = [Pipe() for _ in range(self._count)]
        helper_ends = [helper_end for _, helper_end in pairs]
        try:
            if pairs:
                process = _start_helper([helper_end.fileno() for helper_end in helper_ends])
                self._links = [own_end for own_end, _ in pairs]
                self._end_processes = weakref.finalize(self, _close_links, self._links, process)
        except OSError:
            pass
        # The helper has its own copies of these pipe ends. While a copy is open here, the pipe does
        # not report that the helper has exited.
        for helper_end in helper_ends:
            helper_end.close()


def _has_begun(link: Connection) -> bool:
    with contextlib.suppress(OSError, EOFError):
        return link.poll(STARTING_S) and link.recv() == STARTED
    return False


def _close_links(links: list[Connection], process: subprocess.Popen) -> None:
    for link in links:
        link.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def _start_helper(files: list[int]) -> subprocess.Popen:
    """Start the helper process, which forks the other background processes.

    ``files`` are file descriptors of pipes; the helper listens at the first, and each fork at one
    of the others. The helper ends when this process does.
    """
    arguments = [str(torch.get_num_threads()), *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *arguments],
        pass_fds=files,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def helper() -> None:
    """Entry point of the helper process: fork the other background processes, and serve requests.

    Its command line has the number of torch threads, and then the file descriptors of
    ``_start_helper``.
    """
    threads, *files = map(int, sys.argv[1:])
    own_file, *child_files = files
    # Each child takes one connection; this process keeps the first.
    for file in child_files:
        if os.fork() == 0:
            own_file = file
            break
    for file in files:
        # While a copy of another process's pipe end is open here, the parent cannot notice that the
        # other process has exited.
        if file != own_file:
            os.close(file)
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, EOFError), Connection(own_file) as link:
        while link.poll(IDLE_S):
            request = link.recv()
            if request is not None:
                call, cold = request
                _repeat_call(call, cold, link)


def _repeat_call(call: OpSignature | None, cold: bool, link: Connection) -> None:
    """Make ``call`` repeatedly until another request arrives on ``link``.

    Before that, report on ``link`` whether the call could be made. ``cold`` is as in
    ``BackgroundLoad.while_making``.
    """
    with replay.without_modes_and_grad():
        try:
            run = replay.replay_function(call, cold) if call is not None else fixed_calls
            run()
        except Exception:  # such as an op that refuses these values; the parent gets the same error
            link.send(FAILED)
            return
        link.send(STARTED)
        while not link.poll():
            begin = time.perf_counter()
            while time.perf_counter() - begin < _PAUSE_S:
                run()
