"""Requests to other ranks' processes, which may have ended or be stopped or out of reach.

Every process listens on a socket, and a thread that otherwise sleeps in the kernel answers
(``listener.py``). The sockets are not those of torch.distributed, since a rank must be able to ask
while it waits in torch.distributed, and also when the store is gone with the process that held it.
A request is the secret of the process that is asked, and a line of JSON; the answer is a line of
JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_MESSAGE_BYTES = 1 << 20  # most bytes of a message
ACCEPTED = b"\n"  # the answer of a process that keeps the connection for messages
_CHECK_INTERVAL_S = 0.5  # the longest time between two calls of `check`
_POLL_INTERVAL_S = 0.02  # between two calls of `until`
_UNREACHABLE_ERRORS = errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN


@dataclass(frozen=True)
class Address:
    """Address at which a rank's process listens, and the secret that a request must begin with."""

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
        """Return the state of the process, which must be on this machine; "" if it has ended.

        "R" is running, "S" sleeping, "T" stopped, as in proc(5).
        """
        state, started = state_and_start(self.pid)
        return state if started == self.started and state not in ("Z", "X") else ""


def state_and_start(pid: int) -> tuple[str, str]:
    """Return (state, start time) of a process on this machine; two empty texts if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # After the last bracket, since the program's name may contain spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]  # fields 3 and 22 of proc(5)


def ask(
    addresses: Mapping[int, Address],
    request: dict[str, Any],
    limit_s: float,
    until: Callable[[], bool] = lambda: False,
) -> dict[int, dict[str, Any] | None]:
    """Send ``request`` to each rank and return the answers, by rank.

    The answer is None for a rank that does not listen, because its process has ended. A rank is
    left out if it is not known whether it listens: it does not answer within ``limit_s`` seconds or
    before ``until()`` is true, no network reaches it, or this process may open no more sockets.
    """
    answers: dict[int, dict[str, Any] | None] = {}
    deadline = time.monotonic() + limit_s
    try:
        selector = selectors.DefaultSelector()
    except OSError:  # a selector needs a file descriptor, too
        return answers
    with selector as ready:
        for rank, address in addresses.items():
            try:
                connection = socket.socket(family_of(address.host), socket.SOCK_STREAM)
            except OSError:
                continue
            connection.setblocking(False)
            # Unreachable is not the same as ended: such a rank gets no entry, rather than None.
            if connection.connect_ex((address.host, address.port)) in _UNREACHABLE_ERRORS:
                connection.close()
                continue
            text = address.secret.encode() + json.dumps(request).encode() + b"\n"
            ready.register(connection, selectors.EVENT_WRITE, _PendingRequest(rank, text))
        while ready.get_map() and (remaining_s := deadline - time.monotonic()) > 0 and not until():
            for key, _ in ready.select(min(remaining_s, _POLL_INTERVAL_S)):
                assert isinstance(key.fileobj, socket.socket)
                if _advance_exchange(ready, key.fileobj, key.data, answers):
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
        for key in list(ready.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return answers


def open_message_connection(
    address: Address,
    request: dict[str, Any],
    limit_s: float,
    deadline: float,
    check: Callable[[], None],
) -> int:
    """Open a connection over which another process will receive messages; return its socket.

    Args:
        address: where the other process listens.
        request: what is sent first; by it the process decides whether to accept the connection.
        limit_s: seconds within which the connection must be made.
        deadline: the value of ``time.monotonic()`` until which this waits for the answer.
        check: called regularly while this waits; may raise.

    Returns:
        The file descriptor of the socket, which the caller owns.

    Raises:
        TimeoutError: there is no connection within ``limit_s`` seconds, or no answer before
            ``deadline``.
        OSError: the process does not accept the connection.
    """
    connection = socket.socket(family_of(address.host), socket.SOCK_STREAM)
    try:
        _connect(connection, address, min(time.monotonic() + limit_s, deadline), check)
        # Short, so that `check` is called often enough while this waits for the answer.
        connection.settimeout(_CHECK_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(address.secret.encode() + json.dumps(request).encode() + b"\n")
        while True:
            check()
            try:
                if connection.recv(len(ACCEPTED)) == ACCEPTED:
                    # The socket no longer owns the descriptor: `close` below has no effect on it.
                    return connection.detach()
                raise ConnectionRefusedError
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
    finally:
        connection.close()


def _connect(
    connection: socket.socket, address: Address, deadline: float, check: Callable[[], None]
) -> None:
    connection.setblocking(False)
    error = connection.connect_ex((address.host, address.port))
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while error == errno.EINPROGRESS:
        check()
        if poll.poll(1000 * _CHECK_INTERVAL_S):
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        elif time.monotonic() > deadline:
            raise TimeoutError
    if error:
        raise OSError(error, os.strerror(error))


@dataclass
class _PendingRequest:
    rank: int
    text: bytes
    answer: bytes = b""


def _advance_exchange(
    selector: selectors.BaseSelector,
    connection: socket.socket,
    pending: _PendingRequest,
    answers: dict[int, dict[str, Any] | None],
) -> bool:
    """Receive or send what is possible without blocking; return whether the exchange is over.

    A complete answer is entered in ``answers``.
    """
    try:
        if pending.text:
            pending.text = pending.text[connection.send(pending.text) :]
            if not pending.text:
                selector.modify(connection, selectors.EVENT_READ, pending)
            return False
        chunk = connection.recv(65536)
        pending.answer += chunk
        if chunk and not pending.answer.endswith(b"\n") and len(pending.answer) < MAX_MESSAGE_BYTES:
            return False
        answer = json.loads(pending.answer)
        answers[pending.rank] = answer if isinstance(answer, dict) else None
    except BlockingIOError:
        return False
    except Exception as error:  # noqa: BLE001 - it does not listen, or it is another program
        if getattr(error, "errno", None) not in _UNREACHABLE_ERRORS:
            answers[pending.rank] = None
    return True


def own_host(store_host: str | None) -> str:
    """Return the address by which others reach this machine.

    It is the address of the interface in GLOO_SOCKET_IFNAME, else of the interface that leads to
    the store.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with contextlib.suppress(OSError):
        if interface:
            return _address_of(interface)
    try:
        target = store_host or socket.gethostname()
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: selects the interface, sends nothing
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = struct.pack("256s", interface[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, name)[20:24])  # SIOCGIFADDR


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
