"""A link between ranks that is cut or slow: what one rank listens at is reached through a thread
that passes bytes on, or does not.

```
rank 1 -- connects to --> Link of rank 0 -- passes on --> rank 0
```

All that goes between two hosts takes such a link: messages, questions where a rank is, the store.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from mirrored.transports.faults import watch

CUTS = ("drop", "one way", "reset", "half")
SLOW = ("delay", "throttle", "trickle", "pause")
_MOST_WAITING = 1 << 20  # bytes that a link holds for one direction
_BYTES_PER_S = 2e6  # of "throttle"
_DELAY_S = 0.05  # of "delay"
_PAUSE_S = 1.0  # of "pause": less than ranks wait


class Fate:
    """What happens to a link. Args:
    kind: "" or one of `CUTS` and `SLOW`. "drop" loses bytes of both directions, "one way" those to
        this rank, "reset" ends connections by a RST and refuses new ones, "half" ends the direction
        to this rank as if the other side had shut it down.
    after: the bytes that still pass once `begin` was called.
    """

    def __init__(self, kind: str = "", after: int = 0) -> None:
        self.kind, self.left = kind, after
        self.begun = self.cut = False
        self.cut_at = 0.0

    def begin(self) -> None:
        self.begun = True

    def passing(self, size: int, inward: bool) -> int:
        """How many of so many bytes pass now."""
        if self.kind == "trickle":
            return min(size, random.randint(1, 9) if random.random() < 0.5 else 4096)
        if not self.begun or self.kind not in (*CUTS, "pause"):
            return size
        if self.kind in ("one way", "half") and not inward:
            return size
        passed = min(size, self.left)
        self.left -= passed
        if self.left == 0 and not self.cut:
            self.cut, self.cut_at = True, time.monotonic()
        if self.kind == "pause" and self.cut and time.monotonic() > self.cut_at + _PAUSE_S:
            return size
        return passed


@dataclass
class _Way:
    """One direction of a connection."""

    source: socket.socket
    to: socket.socket
    inward: bool
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    held: int = 0
    ended: bool = False  # the source sends no more
    shut: bool = False
    free: float = 0.0  # when the line is free


class Link(threading.Thread):
    """Passes on to `target` what comes at `address`."""

    def __init__(self, target: tuple[str, int], fate: Fate) -> None:
        super().__init__(daemon=True)
        self._target, self._fate = target, fate
        self._server = socket.create_server((target[0], 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._ways: list[_Way] = []
        self._looked_at = selectors.DefaultSelector()
        self._looked_at.register(self._server, selectors.EVENT_READ)
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                for key, _ in self._looked_at.select(0.005):
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        self._read(key.data)
                if self._fate.cut and self._fate.kind == "reset":
                    return self._reset()
                for way in self._ways:
                    self._pass_on(way)

    def _accept(self) -> None:
        asker = self._server.accept()[0]
        try:
            there = socket.create_connection(self._target)
        except OSError:
            asker.close()
            return
        for one, other, inward in ((asker, there, True), (there, asker, False)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
            self._ways.append(_Way(one, other, inward))
            self._looked_at.register(one, selectors.EVENT_READ, self._ways[-1])

    def _read(self, way: _Way) -> None:
        if way.held > _MOST_WAITING:
            return
        try:
            data = way.source.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            way.ended = True
            self._looked_at.unregister(way.source)
            return
        way.held += len(data)
        due = time.monotonic()
        if self._fate.kind == "delay":
            due += _DELAY_S
        if self._fate.kind == "throttle":
            way.free = due = max(way.free, due) + len(data) / _BYTES_PER_S
        way.waiting.append((due, data))

    def _pass_on(self, way: _Way) -> None:
        while way.waiting and way.waiting[0][0] <= time.monotonic() and not way.shut:
            data = way.waiting[0][1]
            passing = self._fate.passing(len(data), way.inward)
            if not passing:
                break
            try:
                sent = way.to.send(data[:passing])
            except BlockingIOError:
                break
            except OSError:
                way.waiting.clear()
                break
            way.held -= sent
            if sent == len(data):
                way.waiting.popleft()
            else:
                way.waiting[0] = 0.0, data[sent:]
        halved = self._fate.kind == "half" and self._fate.cut and way.inward
        if not way.shut and (halved or way.ended and not way.waiting):
            way.shut = True
            with contextlib.suppress(OSError):
                way.to.shutdown(socket.SHUT_WR)

    def _reset(self) -> None:
        self._server.close()
        for way in self._ways:
            at_once = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            way.source.close()


def through_links(fate: Fate) -> None:
    """What this process listens at is reached through a link from now on."""
    plain = watch.RequestListener

    def linked(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        host, port = Link((made.address.host, made.address.port), fate).address
        made.address = replace(made.address, host=host, port=port)
        return made

    watch.RequestListener = linked  # type: ignore[assignment,misc]
