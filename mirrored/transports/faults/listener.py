"""The thread of a process that answers other ranks, and that no stranger makes deaf.

Anybody who reaches the port may connect. A request begins with the secret, which only ranks know
from the store; whoever sends another byte is cut off at once, and nothing of it is read. A
connection has a second for all of its request and answer, at most `_MOST_OPEN` are open, and a new
one takes the place of the oldest. One file is kept in reserve, to accept a rank by even
where the process may open no more. Whatever a turn of the thread raises, the next one begins.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from .wire import MOST, TAKEN, Address, family_of, state_and_start

_LIMIT_S = 1.0  # seconds for a whole request and its answer
_MOST_OPEN = 64


class Listener:
    """Answers what other processes ask, in a thread of its own.

    Args:
        host: the address of this machine by which the others reach it.
        answer: request -> answer, called in the thread.
        idle: called in the thread at the start, and again after as many seconds as it returned,
            until it returns None. Then the thread sleeps until it is asked.
        joined: given the rank and the file of a connection that another rank makes for messages;
            called in the thread.
    """

    def __init__(
        self,
        host: str,
        answer: Callable[[dict[str, Any]], dict[str, Any]],
        idle: Callable[[], float | None],
        joined: Callable[[int, int], None] | None = None,
    ) -> None:
        self._joined = joined
        self._server = _listening(host)
        self._woken, self._waker = socket.socketpair()
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._server, selectors.EVENT_READ)
        self._ready.register(self._woken, selectors.EVENT_READ)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._answer, self._idle = answer, idle
        self._open: dict[socket.socket, _Request] = {}  # the oldest first
        self._look_at: float | None = time.monotonic()  # when `idle` is called next
        self._closed = False
        port, pid = self._server.getsockname()[1], os.getpid()
        self.address = Address(host, port, secrets.token_hex(8), pid, state_and_start(pid)[1])
        self._thread = threading.Thread(target=self._run, name="mirrored-faults", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self.forget()

    def forget(self) -> None:
        """Close the sockets. A forked child, which has no thread, needs nothing more."""
        for each in (self._ready, self._server, self._woken, self._waker, *self._open):
            each.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    # ---- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - such as no memory, which may come back
                time.sleep(0.05)

    def _turn(self) -> None:
        for key, _ in self._ready.select(self._pause()):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.data, _Request):
                assert isinstance(key.fileobj, socket.socket)
                if key.data.go_on(key.fileobj, self._answered):
                    self._hand_over(key.fileobj, key.data)
                    self._drop(key.fileobj)
                elif key.data.answer:
                    self._ready.modify(key.fileobj, selectors.EVENT_WRITE, key.data)
        now = time.monotonic()
        for asker in [asker for asker, each in self._open.items() if each.until < now]:
            self._drop(asker)
        if self._look_at is not None and self._look_at <= now and not self._closed:
            self._look_at = None
            pause = self._idle()
            self._look_at = None if pause is None else time.monotonic() + pause

    def _pause(self) -> float | None:
        """Seconds until something is due; None if nothing is."""
        due = [each.until for each in self._open.values()]
        due += [] if self._look_at is None else [self._look_at]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self) -> None:
        if len(self._open) >= _MOST_OPEN:
            self._drop(next(iter(self._open)))
        try:
            asker = self._server.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._free_a_file()  # the server is ready still, in the next turn
            return
        asker.setblocking(False)
        self._open[asker] = request = _Request(self.address.secret.encode())
        self._ready.register(asker, selectors.EVENT_READ, request)

    def _free_a_file(self) -> None:
        """Make room for a connection where this process may open no more files."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        elif self._open:
            self._drop(next(iter(self._open)))
        else:
            time.sleep(0.05)

    def _hand_over(self, asker: socket.socket, request: _Request) -> None:
        """Give a connection that is for messages to who receives them."""
        if request.joins is not None and self._joined is not None:
            self._joined(request.joins, os.dup(asker.fileno()))

    def _drop(self, asker: socket.socket) -> None:
        self._ready.unregister(asker)
        asker.close()
        self._open.pop(asker, None)
        if self._spare is None and not self._open:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _answered(self, text: bytes) -> tuple[bytes, int | None]:
        """The answer, and the rank that joins."""
        request = json.loads(text)
        if request.get("asks") == "join":
            return TAKEN, int(request["rank"])
        return json.dumps(self._answer(request)).encode() + b"\n", None


class _Request:
    """What came of a request so far, and what is left of its answer to send."""

    def __init__(self, secret: bytes) -> None:
        self.secret, self.text, self.answer = secret, b"", b""
        self.joins: int | None = None  # the rank that makes the connection for its messages
        self.until = time.monotonic() + _LIMIT_S

    def go_on(
        self, asker: socket.socket, answered: Callable[[bytes], tuple[bytes, int | None]]
    ) -> bool:
        """Receive or send what is possible without waiting; whether the connection is done with."""
        try:
            if self.answer:
                self.answer = self.answer[asker.send(self.answer) :]
                return not self.answer
            more = asker.recv(65536)
            self.text += more
            if not more or len(self.text) > MOST or not self._knows_the_secret():
                return True
            if self.text.endswith(b"\n"):
                self.answer, self.joins = answered(self.text[len(self.secret) :])
            return False
        except BlockingIOError:
            return False
        except Exception:  # noqa: BLE001 - a broken connection, or a request that is none
            return True

    def _knows_the_secret(self) -> bool:
        head = self.text[: len(self.secret)]
        return hmac.compare_digest(head, self.secret[: len(head)])


def _listening(host: str) -> socket.socket:
    """At that address; at all of the machine where it is not one of its own, as behind a router."""
    try:
        made = socket.create_server((host, 0), family=family_of(host), backlog=128)
    except OSError:
        made = socket.create_server(("", 0), family=family_of(host), backlog=128)
    made.setblocking(False)
    return made
