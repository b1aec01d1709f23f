"""The launcher's part on one host: it starts processes, and reports to the leader when one ends.

The leader (``leader.py``) decides who is a rank. The agent ends no process because another one has
ended.

Each process has its own context of ``torch.distributed.elastic.multiprocessing``, because a context
of several processes ends all of them when one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from mirrored.transports.faults.store import LimitedStore

from . import mail
from .membership import SILENT_S

VARIABLE = "CONSISTENT_ELASTIC"  # in the environment of a process that may be a rank
_TURN_S = 0.02
_BEAT_S = 0.5
_END_S = 5  # seconds that processes get to end by themselves


class Agent:
    """Starts the processes of one host, watches them, and carries out the leader's messages.

    The leader is the thread in the first launcher that decides which processes train.

    Args:
        number: number of this launcher among all launchers.
        host, port: address of the store.
        command: the program and its arguments.
        environment: variables that its processes get in addition to this process's environment.

    Attributes:
        is_cut_off: whether the store cannot be reached, so that threads may wait for it forever.
    """

    def __init__(
        self,
        number: int,
        host: str,
        port: int,
        command: Sequence[str],
        environment: dict[str, str],
    ) -> None:
        self._number, self._host, self._port = number, host, port
        self._command, self._environment = list(command), environment
        self.is_cut_off = False
        self._logs = tempfile.mkdtemp(prefix="consistent-run-")
        self._running: dict[str, PContext] = {}
        self._places: dict[str, int] = {}  # name -> LOCAL_RANK
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._looks = LimitedStore(mail.client(host, port), SILENT_S)
        gone = {"is": "finish", "code": 1, "why": self._out_of_reach()}
        self._mail = mail.Mailbox(
            host, port, mail.agent(number), self._told.put, lambda: self._told.put(gone)
        )
        self._beat_at = 0.0

    def run(self, processes: int) -> int:
        """Start ``processes`` processes, and return the exit status that the leader sends.

        The leader is the thread in the first launcher that decides who is a rank, and when the
        program is over. The status is 1 if the store cannot be reached.
        """
        try:
            for _ in range(processes):
                self._start()
            while True:
                code = self._turn()
                if code is not None:
                    return code
                time.sleep(_TURN_S)
        except RuntimeError:
            self.is_cut_off = True
            print(self._out_of_reach(), file=sys.stderr, flush=True)
            return 1
        finally:
            for context in self._running.values():
                context.close(signal.SIGTERM, timeout=_END_S)
            self._mail.close()
            shutil.rmtree(self._logs, ignore_errors=True)

    def _out_of_reach(self) -> str:
        return (
            f"elastic: the store at {self._host}:{self._port} cannot be reached. Only the side "
            "that holds the store goes on, so the processes of this host end."
        )

    def _turn(self) -> int | None:
        """Handle the messages that have come, look for processes that have ended, and send a beat.

        A beat tells the leader that this host is alive. Returns the exit status once the leader
        has sent it; None before.
        """
        while not self._told.empty():
            message = self._told.get()
            if message["is"] == "finish":
                if message["why"]:
                    print(message["why"], file=sys.stderr, flush=True)
                return message["code"]
            self._obey(message)
        for name, context in list(self._running.items()):
            self._look(name, context)
        if time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            # Raises RuntimeError if the store does not answer in time; ``Agent.run`` then ends the
            # processes of this host.
            self._looks.ask(lambda store: store.check(["elastic/alive"]))
            self._say("beat")
        return None

    def _say(self, kind: str, **more: Any) -> None:
        """Send a message of this kind to the leader, with the entries ``more``."""
        self._mail.send(mail.LEADER, {"is": kind, "agent": self._number, **more})

    def _obey(self, message: dict[str, Any]) -> None:
        """Start a process, or kill one, as a message of the leader says."""
        if message["is"] == "start":
            self._start()
        context = self._running.get(message.get("name", ""))
        if context is None:
            return
        pid = context.pids()[0]
        # The other message is "kill if stopped". The process's whole group is killed.
        if message["is"] == "kill" or _is_stopped(pid):
            os.killpg(pid, signal.SIGKILL)

    def _start(self) -> None:
        """Start one more process that may become a rank, and report it to the leader."""
        name = f"{self._number}-{uuid.uuid4().hex[:8]}"
        taken = set(self._places.values())
        # The lowest free LOCAL_RANK.
        place = next(k for k in range(len(taken) + 1) if k not in taken)
        address = {"host": self._host, "port": self._port, "name": name}
        environment = {
            **self._environment,
            "LOCAL_RANK": str(place),
            VARIABLE: json.dumps(address),
        }
        context = start_processes(
            name="rank",
            entrypoint=self._command[0],
            args={0: tuple(self._command[1:])},
            envs={0: environment},
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(self._logs, name)),
        )
        self._running[name], self._places[name] = context, place
        self._say("began", name=name, pid=context.pids()[0])

    def _look(self, name: str, context: PContext) -> None:
        """Report to the leader if process ``name`` has ended.

        If it has failed, the processes that it had started are killed.
        """
        ended = context.wait(0)
        if ended is None:
            return
        code = ended.failures[0].exitcode if ended.failures else 0
        if code:
            # What it has started, such as the workers of a DataLoader, is in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(context.pids()[0], signal.SIGKILL)
        del self._running[name], self._places[name]
        self._say("ended", name=name, how=_said_of(code))


def _said_of(code: int) -> str:
    """Return how a process has ended: ``has ended with status 1``, ``was ended by SIGKILL``."""
    if code >= 0:
        return f"has ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _is_stopped(pid: int) -> bool:
    """Return whether a process is suspended, as by SIGSTOP or a debugger."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
