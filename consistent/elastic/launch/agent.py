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
from .membership import SILENCE_LIMIT_S

VARIABLE = "CONSISTENT_ELASTIC"  # in the environment of a process that may be a rank
_POLL_S = 0.02
_HEARTBEAT_S = 0.5
_EXIT_GRACE_S = 5  # seconds that processes get to end by themselves


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
        self._log_folder = tempfile.mkdtemp(prefix="consistent-run-")
        self._contexts: dict[str, PContext] = {}
        self._local_ranks: dict[str, int] = {}  # name -> LOCAL_RANK
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._store = LimitedStore(mail.client(host, port), SILENCE_LIMIT_S)
        unreachable = {"is": "finish", "code": 1, "why": self._unreachable_message()}
        self._mailbox = mail.Mailbox(
            host,
            port,
            mail.agent_queue(number),
            self._messages.put,
            lambda: self._messages.put(unreachable),
        )
        self._next_heartbeat = 0.0

    def run(self, processes: int) -> int:
        """Start ``processes`` processes, and return the exit status that the leader sends.

        The leader is the thread in the first launcher that decides who is a rank, and when the
        program is over. The status is 1 if the store cannot be reached.
        """
        try:
            for _ in range(processes):
                self._start_process()
            while True:
                code = self._poll()
                if code is not None:
                    return code
                time.sleep(_POLL_S)
        except RuntimeError:
            self.is_cut_off = True
            print(self._unreachable_message(), file=sys.stderr, flush=True)
            return 1
        finally:
            for context in self._contexts.values():
                context.close(signal.SIGTERM, timeout=_EXIT_GRACE_S)
            self._mailbox.close()
            shutil.rmtree(self._log_folder, ignore_errors=True)

    def _unreachable_message(self) -> str:
        return (
            f"elastic: the store at {self._host}:{self._port} cannot be reached. Only the side "
            "that holds the store goes on, so the processes of this host end."
        )

    def _poll(self) -> int | None:
        """Handle the messages that have come, look for processes that have ended, and send a beat.

        A beat tells the leader that this host is alive. Returns the exit status once the leader
        has sent it; None before.
        """
        while not self._messages.empty():
            message = self._messages.get()
            if message["is"] == "finish":
                if message["why"]:
                    print(message["why"], file=sys.stderr, flush=True)
                return message["code"]
            self._handle_message(message)
        for name, context in list(self._contexts.items()):
            self._check_ended(name, context)
        if time.monotonic() > self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + _HEARTBEAT_S
            # Raises RuntimeError if the store does not answer in time; ``Agent.run`` then ends the
            # processes of this host.
            self._store.ask(lambda store: store.check(["elastic/alive"]))
            self._report("beat")
        return None

    def _report(self, kind: str, **more: Any) -> None:
        """Send a message of this kind to the leader, with the entries ``more``."""
        self._mailbox.send(mail.LEADER, {"is": kind, "agent": self._number, **more})

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Start a process, or kill one, as a message of the leader says."""
        if message["is"] == "start":
            self._start_process()
        context = self._contexts.get(message.get("name", ""))
        if context is None:
            return
        pid = context.pids()[0]
        # The other message is "kill if stopped". The process's whole group is killed.
        if message["is"] == "kill" or _is_stopped(pid):
            os.killpg(pid, signal.SIGKILL)

    def _start_process(self) -> None:
        """Start one more process that may become a rank, and report it to the leader."""
        name = f"{self._number}-{uuid.uuid4().hex[:8]}"
        used = set(self._local_ranks.values())
        # The lowest free LOCAL_RANK.
        local_rank = next(k for k in range(len(used) + 1) if k not in used)
        address = {"host": self._host, "port": self._port, "name": name}
        environment = {
            **self._environment,
            "LOCAL_RANK": str(local_rank),
            VARIABLE: json.dumps(address),
        }
        context = start_processes(
            name="rank",
            entrypoint=self._command[0],
            args={0: tuple(self._command[1:])},
            envs={0: environment},
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(self._log_folder, name)),
        )
        self._contexts[name], self._local_ranks[name] = context, local_rank
        self._report("began", name=name, pid=context.pids()[0])

    def _check_ended(self, name: str, context: PContext) -> None:
        """Report to the leader if process ``name`` has ended.

        If it has failed, the processes that it had started are killed.
        """
        result = context.wait(0)
        if result is None:
            return
        code = result.failures[0].exitcode if result.failures else 0
        if code:
            # What it has started, such as the workers of a DataLoader, is in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(context.pids()[0], signal.SIGKILL)
        del self._contexts[name], self._local_ranks[name]
        self._report("ended", name=name, how=_describe_exit(code))


def _describe_exit(code: int) -> str:
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
