"""The thread by which a process answers other ranks, protected against strangers on its port.

Anybody who reaches the port may connect. So a request begins with a secret, which only ranks know,
because it is exchanged through the store. A connection that sends a wrong byte is closed at once,
and its request is not parsed. A connection has one second for its whole request and answer. At most
``_MOST_OPEN`` are open, and a new one replaces the oldest. One file descriptor is held in reserve,
to accept a rank even if the process may open no more. If an iteration of the thread's loop raises,
the next one runs all the same.
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


class RequestListener:
    """Thread that answers requests of other ranks' processes.

    Args:
        host: the address of this machine by which the others reach it.
        answer: returns the answer to a request; called in the thread.
        idle: called in the thread at the start, and again after as many seconds as it returned,
            until it returns None. Then the thread sleeps until a request comes.
        joined: called in the thread with a rank and the file descriptor of a connection by which
            that rank will send its messages.
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
        self._look_at: float | None = time.monotonic()  # the next call of `idle`
        self._closed = False
        port, pid = self._server.getsockname()[1], os.getpid()
        self.address = Address(host, port, secrets.token_hex(8), pid, state_and_start(pid)[1])
        self._thread = threading.Thread(target=self._run, name="mirrored-faults", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the sockets."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self.forget()

    def forget(self) -> None:
        """Close the sockets only, for a forked child, in which the thread does not run."""
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
            except Exception:  # noqa: BLE001 - such as out of memory, which may pass
                time.sleep(0.05)

    def _turn(self) -> None:
        """Wait for requests, serve them, drop late ones, and call ``idle`` if it is due."""
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
        """Return for how many seconds to wait for a request; None for no limit.

        The wait ends at the deadline of an open connection, or when ``idle`` is to be called.
        """
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
                self._free_a_file()  # the next turn accepts: the connection is still pending
            return
        asker.setblocking(False)
        self._open[asker] = request = _Request(self.address.secret.encode())
        self._ready.register(asker, selectors.EVENT_READ, request)

    def _free_a_file(self) -> None:
        """Free a file descriptor for a connection, when this process may open no more.

        It closes the one in reserve, or else the oldest connection.
        """
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        elif self._open:
            self._drop(next(iter(self._open)))
        else:
            time.sleep(0.05)

    def _hand_over(self, asker: socket.socket, request: _Request) -> None:
        """Pass the connection to ``joined`` if it was made to send a rank's messages."""
        if request.joins is not None and self._joined is not None:
            # A duplicate, since `_drop` closes the socket.
            self._joined(request.joins, os.dup(asker.fileno()))

    def _drop(self, asker: socket.socket) -> None:
        self._ready.unregister(asker)
        asker.close()
        self._open.pop(asker, None)
        if self._spare is None and not self._open:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _answered(self, text: bytes) -> tuple[bytes, int | None]:
        """Return (the answer to a request, the rank that asks to join or None).

        A rank asks to join to send its messages by this connection from then on.
        """
        request = json.loads(text)
        if request.get("asks") == "join":
            return TAKEN, int(request["rank"])
        return json.dumps(self._answer(request)).encode() + b"\n", None


class _Request:
    """State of one connection: the request so far, and the rest of the answer to send."""

    def __init__(self, secret: bytes) -> None:
        self.secret, self.text, self.answer = secret, b"", b""
        self.joins: int | None = None  # the rank that will send its messages by this connection
        self.until = time.monotonic() + _LIMIT_S

    def go_on(
        self, asker: socket.socket, answered: Callable[[bytes], tuple[bytes, int | None]]
    ) -> bool:
        """Receive or send what is possible without blocking; return whether the exchange is over.

        ``asker`` is the connection. ``answered`` returns (the answer to a complete request, the
        rank that asks to join or None).
        """
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
        # Compare a part of the secret as soon as it is there: a stranger is cut off at the first
        # wrong byte.
        head = self.text[: len(self.secret)]
        return hmac.compare_digest(head, self.secret[: len(head)])


def _listening(host: str) -> socket.socket:
    """Return a server socket at the address ``host``.

    If that is no address of this machine, as behind a router, it listens at all addresses.
    """
    try:
        made = socket.create_server((host, 0), family=family_of(host), backlog=128)
    except OSError:
        made = socket.create_server(("", 0), family=family_of(host), backlog=128)
    made.setblocking(False)
    return made
