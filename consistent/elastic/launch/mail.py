"""Messages between launchers and ranks: JSON in queues of the TCPStore that the first launcher has.

A process reads its own queue in a thread that sleeps in the store, and writes into those of others.
The store's host decides: who cannot reach it cannot be in a world that is made from then on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LEADER = "leader"
_FOREVER = timedelta(days=30)


def client(host: str, port: int, timeout: timedelta = _FOREVER) -> Any:
    """A connection to the store, which waits as long for an answer."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def agent(number: int) -> str:
    """The queue of the launcher of a host."""
    return f"agent/{number}"


def worker(name: str) -> str:
    """The queue of a process that may be a rank."""
    return f"worker/{name}"


def send(store: Any, to: str, message: dict[str, Any]) -> None:
    """Put a message into a queue. Raises RuntimeError if the store is gone."""
    store.queue_push(f"elastic/{to}", json.dumps(message))


def receive(store: Any, queue: str) -> dict[str, Any]:
    """The next message of a queue; waits for it."""
    return json.loads(store.queue_pop(f"elastic/{queue}", True))


class Mailbox:
    """Reads a queue in a thread, until ``close``.

    Args:
        take: called there with each message.
        lost: called there once if the store can no longer be reached.
    """

    def __init__(
        self,
        host: str,
        port: int,
        queue: str,
        take: Callable[[dict[str, Any]], None],
        lost: Callable[[], None],
    ) -> None:
        self._reads, self._writes = client(host, port), client(host, port)
        self._queue, self._take, self._lost = queue, take, lost
        self._thread = threading.Thread(target=self._run, name="consistent-mail", daemon=True)
        self._thread.start()

    def send(self, to: str, message: dict[str, Any]) -> None:
        """Put a message into another queue."""
        send(self._writes, to, message)

    def close(self) -> None:
        """End the thread, as far as the store lets it."""
        try:
            send(self._writes, self._queue, {"is": "close"})
        except RuntimeError:
            return
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            try:
                message = receive(self._reads, self._queue)
            except RuntimeError:
                self._lost()
                return
            if message["is"] == "close":
                return
            self._take(message)
