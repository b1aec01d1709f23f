"""Thread in the first launcher that decides which processes form the world (``Leader``)."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from . import mail
from .membership import Membership


class Leader:
    """Host of the TCPStore, and the thread that answers messages by the rules of ``Membership``.

    It runs in the first launcher until the program is over.

    Args:
        host, port: where the store listens; port 0 takes a free one.
        membership: the rules by which it decides which processes form the world.
    """

    def __init__(self, host: str, port: int, membership: Membership) -> None:
        self.store: Any = TCPStore(host, port, is_master=True, wait_for_workers=False)
        self.port: int = self.store.port
        self._membership = membership
        self._read_store = mail.client(host, self.port)
        self._write_store = mail.client(host, self.port)
        self._thread = threading.Thread(target=self._run, name="consistent-leader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._membership.code is None or self._membership.workers:
            received = mail.receive(self._read_store, mail.LEADER)
            for to, message in self._membership.handle(received, time.monotonic()):
                mail.send(self._write_store, to, message)
            for line in self._membership.log:
                print(line, file=sys.stderr, flush=True)
            self._membership.log.clear()
