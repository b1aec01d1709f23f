"""Run a launcher whose ranks are forks of it: they have imported torch already, so that a rank
starts in 0.1 s instead of 3.

    python -m tests.forked_ranks consistent run --nproc-per-node 2 PROGRAM ...
    python -m tests.forked_ranks torch.distributed.run --nproc_per_node 2 PROGRAM ...

Torch's launcher and ours start a rank by the same class of torch, whose ``Popen`` is replaced. All
else is the launcher's own: pipes, process groups, signals, exit statuses.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.launch import be_program

# What the ranks' programs import. The launcher has threads (a store, a mailbox), which a rank does
# not get: it uses nothing of theirs, and closes their connections.
IMPORTED = ("consistent.checkpoint", "consistent.elastic", "consistent.data", "torch._dynamo")


class Forked:
    """A rank, with those methods of ``subprocess.Popen`` that launchers call."""

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        start_new_session: bool,
    ) -> None:
        assert tuple(args[:2]) == (sys.executable, "-u") and start_new_session, args
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be_rank(args[2:], env, [each and each.fileno() for each in (stdout, stderr)])

    def poll(self) -> int | None:
        """Return the exit status, minus the signal that ended it, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended; raise TimeoutExpired after ``timeout`` s."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_rank(words: Sequence[str], env: dict[str, str], files: Sequence[int | None]) -> NoReturn:
    """Run the program as a new interpreter in a new session would."""
    try:
        os.setsid()
        for number, given in enumerate(files, start=1):
            if given is not None:
                os.dup2(given, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them the launcher's connections
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        be_program(words[0], tuple(words[1:]), env)
    finally:
        os._exit(1)


def main(launcher: str, *args: str) -> None:
    """Run the module ``launcher`` with ``args`` in this process."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # nothing that is imported is copied because a rank looks for garbage
    subprocess_handler.Popen = Forked  # pyright: ignore[reportPrivateImportUsage]
    sys.argv[:] = [launcher, *args]
    runpy.run_module(launcher, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
