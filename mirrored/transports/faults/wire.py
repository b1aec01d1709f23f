"""Asks other processes questions over sockets. They may have ended, be stopped or be out of reach.

Every process listens, and a thread that otherwise sleeps in the kernel answers. The sockets are not
those of torch.distributed: a rank must be able to ask while it waits there, and also when the store
is gone with the process that held it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_MOST = 1 << 20  # most bytes of a message


@dataclass(frozen=True)
class Address:
    """Where a process listens, and the secret by which it knows who may ask."""

    host: str
    port: int
    secret: str
    pid: int
    started: str  # when the process started, which tells it from another one with the same pid

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str | bytes) -> Address:
        return Address(**json.loads(text))

    def state(self) -> str:
        """The state of the process, which must be on this machine ("R" for running, "S" for
        sleeping, "T" for stopped); "" if it has ended."""
        state, started = _state_and_start(self.pid)
        return state if started == self.started and state not in ("Z", "X") else ""


def _state_and_start(pid: int) -> tuple[str, str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Listener:
    """Answers what other processes ask, in a thread of its own.

    Args:
        host: the address of this machine by which the others reach it.
        answer: request -> answer, called in the thread.
        idle: called in the thread at the start, and again after as many seconds as it returned,
            until it returns None. Then the thread sleeps until it is asked.
    """

    def __init__(
        self,
        host: str,
        answer: Callable[[dict[str, Any]], dict[str, Any]],
        idle: Callable[[], float | None],
    ) -> None:
        self._server = _listening(host)
        self._woken, self._waker = socket.socketpair()
        self._answer, self._idle = answer, idle
        self._closed = False
        port = self._server.getsockname()[1]
        pid = os.getpid()
        self.address = Address(host, port, secrets.token_hex(8), pid, _state_and_start(pid)[1])
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
        for each in (self._server, self._woken, self._waker):
            each.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready, contextlib.suppress(OSError):
            ready.register(self._server, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            pause = self._idle()
            while True:
                events = ready.select(pause)
                if self._closed:
                    return
                if not events:
                    pause = self._idle()
                elif any(key.fileobj is self._server for key, _ in events):
                    self._serve(self._server.accept()[0])

    def _serve(self, asker: socket.socket) -> None:
        """Answer one request. A malformed one gets no answer, and its connection is closed."""
        with asker, contextlib.suppress(OSError, ValueError):
            asker.settimeout(0.5)
            request = json.loads(_line(asker))
            if isinstance(request, dict) and request.get("secret") == self.address.secret:
                asker.sendall(json.dumps(self._answer(request)).encode() + b"\n")


def _listening(host: str) -> socket.socket:
    """At that address; at all of the machine where it is not one of its own, as behind a router."""
    family = _family(host)
    try:
        return socket.create_server((host, 0), family=family, backlog=128)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=128)


def _line(asker: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n") and len(text) < _MOST:
        more = asker.recv(65536)
        if not more:
            break
        text += more
    return text


def ask(
    addresses: Mapping[int, Address], request: dict[str, Any], limit_s: float
) -> dict[int, dict[str, Any] | None]:
    """The answer of each rank; None if the rank does not listen. Ranks that do not answer within
    `limit_s` seconds are left out."""
    answers: dict[int, dict[str, Any] | None] = {}
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as ready:
        for rank, address in addresses.items():
            asked = socket.socket(_family(address.host), socket.SOCK_STREAM)
            asked.setblocking(False)
            asked.connect_ex((address.host, address.port))
            text = json.dumps(request | {"secret": address.secret}).encode() + b"\n"
            ready.register(asked, selectors.EVENT_WRITE, _Question(rank, text))
        while ready.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                assert isinstance(key.fileobj, socket.socket)
                if _go_on(ready, key.fileobj, key.data, answers):
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
        for key in list(ready.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return answers


@dataclass
class _Question:
    rank: int
    text: bytes
    answer: bytes = b""


def _go_on(
    ready: selectors.BaseSelector,
    asked: socket.socket,
    question: _Question,
    answers: dict[int, dict[str, Any] | None],
) -> bool:
    """Send or receive what is possible without waiting; whether the exchange is finished."""
    try:
        if question.text:
            question.text = question.text[asked.send(question.text) :]
            if not question.text:
                ready.modify(asked, selectors.EVENT_READ, question)
            return False
        more = asked.recv(65536)
        question.answer += more
        if more and not question.answer.endswith(b"\n"):
            return False
        answers[question.rank] = json.loads(question.answer) if question.answer else None
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        answers[question.rank] = None
    return True


def own_host(store_host: str | None) -> str:
    """The address by which others reach this machine: that of the interface that gloo was told to
    use, else that by which this machine reaches the store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with contextlib.suppress(OSError):
        if interface:
            return _address_of(interface)
    try:
        target = store_host or socket.gethostname()
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = struct.pack("256s", interface[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, name)[20:24])  # SIOCGIFADDR


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
