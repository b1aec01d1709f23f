"""The thread by which a process answers other ranks, protected against strangers on its port.

Anybody who reaches the port may connect. So a request begins with a secret, which only ranks know,
because it is exchanged through the store. A connection that sends a wrong byte is closed at once,
and its request is not parsed. A connection has one second for its whole request and answer. At most
``_MAX_CONNECTIONS`` are open, and a new one replaces the oldest. One file descriptor is held in
reserve, to accept a rank even if the process may open no more. If an iteration of the thread's loop
raises, the next one runs all the same.
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

from .wire import ACCEPTED, MAX_MESSAGE_BYTES, Address, family_of, state_and_start

_REQUEST_LIMIT_S = 1.0  # seconds for a whole request and its answer
_MAX_CONNECTIONS = 64


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
        self._on_join = joined
        self._server = _server_socket(host)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._spare_file: int | None = os.open(os.devnull, os.O_RDONLY)
        self._answer_callback, self._idle_callback = answer, idle
        self._connections: dict[socket.socket, _Request] = {}  # the oldest first
        self._next_idle_call: float | None = time.monotonic()  # the next call of `idle`
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
            self._wake_sender.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self.forget()

    def forget(self) -> None:
        """Close the sockets only, for a forked child, in which the thread does not run."""
        for resource in (
            self._selector,
            self._server,
            self._wake_receiver,
            self._wake_sender,
            *self._connections,
        ):
            resource.close()
        if self._spare_file is not None:
            os.close(self._spare_file)
            self._spare_file = None

    # ---- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve_once()
            except Exception:  # noqa: BLE001 - such as out of memory, which may pass
                time.sleep(0.05)

    def _serve_once(self) -> None:
        """Wait for requests, serve them, drop late ones, and call ``idle`` if it is due."""
        for key, _ in self._selector.select(self._select_timeout()):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.data, _Request):
                assert isinstance(key.fileobj, socket.socket)
                if key.data.advance(key.fileobj, self._encoded_answer):
                    self._pass_on_connection(key.fileobj, key.data)
                    self._close_connection(key.fileobj)
                elif key.data.answer:
                    self._selector.modify(key.fileobj, selectors.EVENT_WRITE, key.data)
        now = time.monotonic()
        for connection in [
            connection
            for connection, request in self._connections.items()
            if request.deadline < now
        ]:
            self._close_connection(connection)
        if self._next_idle_call is not None and self._next_idle_call <= now and not self._closed:
            self._next_idle_call = None
            pause = self._idle_callback()
            self._next_idle_call = None if pause is None else time.monotonic() + pause

    def _select_timeout(self) -> float | None:
        """Return for how many seconds to wait for a request; None for no limit.

        The wait ends at the deadline of an open connection, or when ``idle`` is to be called.
        """
        deadlines = [request.deadline for request in self._connections.values()]
        deadlines += [] if self._next_idle_call is None else [self._next_idle_call]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._close_connection(next(iter(self._connections)))
        try:
            connection = self._server.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._free_descriptor()  # the next turn accepts: the connection is still pending
            return
        connection.setblocking(False)
        self._connections[connection] = request = _Request(self.address.secret.encode())
        self._selector.register(connection, selectors.EVENT_READ, request)

    def _free_descriptor(self) -> None:
        """Free a file descriptor for a connection, when this process may open no more.

        It closes the one in reserve, or else the oldest connection.
        """
        if self._spare_file is not None:
            os.close(self._spare_file)
            self._spare_file = None
        elif self._connections:
            self._close_connection(next(iter(self._connections)))
        else:
            time.sleep(0.05)

    def _pass_on_connection(self, connection: socket.socket, request: _Request) -> None:
        """Pass the connection to ``joined`` if it was made to send a rank's messages."""
        if request.joining_rank is not None and self._on_join is not None:
            # A duplicate, since `_close_connection` closes the socket.
            self._on_join(request.joining_rank, os.dup(connection.fileno()))

    def _close_connection(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._connections.pop(connection, None)
        if self._spare_file is None and not self._connections:
            with contextlib.suppress(OSError):
                self._spare_file = os.open(os.devnull, os.O_RDONLY)

    def _encoded_answer(self, text: bytes) -> tuple[bytes, int | None]:
        """Return (the answer to a request, the rank that asks to join or None).

        A rank asks to join to send its messages by this connection from then on.
        """
        request = json.loads(text)
        if request.get("asks") == "join":
            return ACCEPTED, int(request["rank"])
        return json.dumps(self._answer_callback(request)).encode() + b"\n", None


class _Request:
    """State of one connection: the request so far, and the rest of the answer to send."""

    def __init__(self, secret: bytes) -> None:
        self.secret, self.text, self.answer = secret, b"", b""
        self.joining_rank: int | None = None  # the rank that will send messages by this connection
        self.deadline = time.monotonic() + _REQUEST_LIMIT_S

    def advance(
        self, connection: socket.socket, answer_request: Callable[[bytes], tuple[bytes, int | None]]
    ) -> bool:
        """Receive or send what is possible without blocking; return whether the exchange is over.

        ``connection`` is that of the request. ``answer_request`` returns (the answer to a complete
        request, the rank that asks to join or None).
        """
        try:
            if self.answer:
                self.answer = self.answer[connection.send(self.answer) :]
                return not self.answer
            chunk = connection.recv(65536)
            self.text += chunk
            if not chunk or len(self.text) > MAX_MESSAGE_BYTES or not self._has_valid_secret():
                return True
            if self.text.endswith(b"\n"):
                self.answer, self.joining_rank = answer_request(self.text[len(self.secret) :])
            return False
        except BlockingIOError:
            return False
        except Exception:  # noqa: BLE001 - a broken connection, or a request that is none
            return True

    def _has_valid_secret(self) -> bool:
        # Compare a part of the secret as soon as it is there: a stranger is cut off at the first
        # wrong byte.
        head = self.text[: len(self.secret)]
        return hmac.compare_digest(head, self.secret[: len(head)])


def _server_socket(host: str) -> socket.socket:
    """Return a server socket at the address ``host``.

    If that is no address of this machine, as behind a router, it listens at all addresses.
    """
    try:
        server = socket.create_server((host, 0), family=family_of(host), backlog=128)
    except OSError:
        server = socket.create_server(("", 0), family=family_of(host), backlog=128)
    server.setblocking(False)
    return server
