"""Connection of this process to the launcher, which tells it when a world begins and ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import queue
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed.distributed_c10d as c10d

from mirrored.transports.torch_dist import rejoin

from .launch import mail
from .launch.agent import VARIABLE
from .recovery import Recovery


@dataclass(frozen=True)
class ElasticWorld:
    """A set of ranks that train together until a rank is lost or joins, as seen from one rank.

    Attributes:
        epoch: number of this world, counted from 1.
        rank: number of this process in the world.
        size: number of ranks.
        losses: for each rank that was lost from the world before, a text about it.
        new_ranks: ranks that were not in the world before.
    """

    epoch: int
    rank: int
    size: int
    losses: list[str]
    new_ranks: list[int]


class Stopped(RuntimeError):
    """Raised in a process that must end while other ranks continue.

    The launcher has decided so, or this rank is slow and is left out.
    """


class Member:
    """Connection of this process to the launcher, which forms worlds (sets of ranks that train).

    ``run`` waits for each world by ``next_world``. A thread receives the launcher's messages.

    Attributes:
        should_leave: whether the ranks are to leave their world after this step.
        lost_at: when this process learned that its world is over, as ``time.monotonic`` gives it;
            None if it is not.
    """

    def __init__(self, host: str, port: int, name: str) -> None:
        self._host, self._port, self._name = host, port, name
        self._worlds: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._epoch = 0
        self._end_reason: str | None = None  # why the world of that epoch is over
        self.should_leave = False
        self.lost_at: float | None = None
        # Created last, because its thread may call the methods below at once.
        self._mailbox = mail.Mailbox(
            host, port, mail.worker_queue(name), self._handle_message, self._on_store_lost
        )

    @staticmethod
    def of_this_process() -> Member | None:
        """Return a connection of this process; None if ``consistent run`` did not start it."""
        address_text = os.environ.get(VARIABLE)
        if address_text is None:
            return None
        address = json.loads(address_text)
        return Member(address["host"], address["port"], address["name"])

    def next_world(self, timeout_s: float, recovery: Recovery) -> ElasticWorld | None:
        """Wait for the launcher's next world, and join it as a process group.

        Args:
            timeout_s: the timeout of the process group.
            recovery: records how long waiting and joining took.

        Returns:
            The world; None if the other ranks have finished the program.

        Raises:
            Stopped: this process may not continue.
        """
        with contextlib.suppress(RuntimeError):  # store gone: the mail thread puts "stop" for it
            self._mailbox.send(mail.LEADER, {"is": "here", "name": self._name, "facts": facts()})
        message = self._worlds.get()
        recovery.end("until all ranks were ready")
        if message["is"] == "stop":
            raise Stopped(message["words"])
        if message["is"] == "over":
            return None
        world = ElasticWorld(
            message["epoch"], message["rank"], message["size"], message["gone"], message["came"]
        )
        store = c10d.PrefixStore(f"elastic/{world.epoch}", mail.client(self._host, self._port))
        rejoin.enter(store, world.rank, world.size, timeout_s, is_first=world.epoch == 1)
        if self._end_reason is not None:  # the world was lost while this rank entered it
            rejoin.stop(self._end_reason)
        recovery.end("to enter the new group")
        return world

    def end_reason(self) -> str | None:
        """Return why the present world is over, as text for an error; None if it goes on."""
        return self._end_reason or rejoin.why_broken()

    def done(self) -> None:
        """Tell the launcher that the program is over on this rank.

        Called after all ranks have reached its end.
        """
        self._mailbox.send(mail.LEADER, {"is": "done", "name": self._name})

    def close(self) -> None:
        """Stop the thread that receives the launcher's messages."""
        self._mailbox.close()

    # ---- in the thread that reads the mail ------------------------------------------------------

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handle one message of the launcher: a new world, or the end of the present one."""
        if message["is"] == "change":
            self.should_leave = self.should_leave or message["epoch"] == self._epoch
        elif message["is"] == "lost":
            if message["epoch"] == self._epoch:
                self._give_up(message["words"])
        else:
            # Set in this thread, because the next message may already be about this world.
            if message["is"] == "world":
                self._epoch, self._end_reason, self.should_leave = message["epoch"], None, False
                self.lost_at = None
            self._worlds.put(message)

    def _on_store_lost(self) -> None:
        """Give up the world because the launcher's store cannot be reached."""
        reason = (
            f"elastic: the store at {self._host}:{self._port} cannot be reached, so its launcher "
            "has ended or the network is cut. Only the store's side goes on, so this rank ends."
        )
        self._worlds.put({"is": "stop", "words": reason})
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Make every call of this rank that communicates raise ``reason``, as its world is over."""
        self._end_reason, self.lost_at = reason, self.lost_at or time.monotonic()
        rejoin.stop(reason)


@functools.cache
def facts() -> dict[str, str]:
    """Return the versions and checksums that must be equal on all ranks of a world.

    For example ``{"torch": "2.9.0", "Python": "3.12.3", ...}``. The launcher stops a process whose
    values differ from those of the others.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    try:
        program = f"{crc32(Path(main).read_bytes()):08x}" if main else "none"
    except OSError:
        program = "unknown"
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "consistent": f"{_source_checksum():08x}",
        "the program": program,
    }


def _source_checksum() -> int:
    """Return a checksum of the library's Python files, to see whether ranks run the same code."""
    checksum = 0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        checksum = crc32(path.read_bytes(), checksum)
    return checksum
