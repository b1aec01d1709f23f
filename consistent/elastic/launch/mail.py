"""Messages between launchers and ranks: JSON in queues of the TCPStore of the first launcher.

A process reads its own queue in a thread that blocks in the store, and writes into the queues of
others. The store's host decides: a process that cannot reach it cannot be in a world that is formed
from then on.
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
    """Return a connection to the launcher's TCPStore.

    Args:
        host, port: the address of the store.
        timeout: the time-out for each answer of the store.
    """
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def agent_queue(number: int) -> str:
    """Return the name of the message queue that launcher ``number`` reads."""
    return f"agent/{number}"


def worker_queue(name: str) -> str:
    """Return the name of the message queue of process ``name``, which is or may become a rank."""
    return f"worker/{name}"


def send(store: Any, to: str, message: dict[str, Any]) -> None:
    """Put ``message`` into the queue ``to`` of the store.

    Raises:
        RuntimeError: the store is gone.
    """
    store.queue_push(f"elastic/{to}", json.dumps(message))


def receive(store: Any, queue: str) -> dict[str, Any]:
    """Wait for the next message of a queue, and return it."""
    return json.loads(store.queue_pop(f"elastic/{queue}", True))


class Mailbox:
    """Thread that reads one queue of the store and passes on its messages, until ``close``.

    Args:
        host, port: the address of the store.
        queue: the name of the queue, from ``agent_queue`` or ``worker_queue``.
        on_message: called in the thread with each message.
        on_lost: called in the thread once if the store can no longer be reached.
    """

    def __init__(
        self,
        host: str,
        port: int,
        queue: str,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        # Two connections, because the one that waits for a message is blocked.
        self._read_store, self._write_store = client(host, port), client(host, port)
        self._queue, self._on_message, self._on_lost = queue, on_message, on_lost
        self._thread = threading.Thread(target=self._run, name="consistent-mail", daemon=True)
        self._thread.start()

    def send(self, to: str, message: dict[str, Any]) -> None:
        """Put ``message`` into the queue ``to`` of another process."""
        send(self._write_store, to, message)

    def close(self) -> None:
        """End the thread; nothing is done if the store cannot be reached any more."""
        try:
            send(self._write_store, self._queue, {"is": "close"})
        except RuntimeError:
            return
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            try:
                message = receive(self._read_store, self._queue)
            except RuntimeError:
                self._on_lost()
                return
            if message["is"] == "close":
                return
            self._on_message(message)
