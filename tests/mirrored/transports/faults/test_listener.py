"""Strangers at the port where a rank listens: none ends the thread, makes it deaf or grows."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mirrored.transports.faults import listener as listening
from mirrored.transports.faults.listener import RequestListener
from mirrored.transports.faults.wire import Address, ask
from tests.faults.setting import T

STRANGERS: dict[str, Callable[[Address], list[socket.socket]]] = {}
Stranger = Callable[[Address], list[socket.socket]]


def stranger(function: Stranger) -> Stranger:
    STRANGERS[function.__name__] = function
    return function


@pytest.fixture
def listener() -> Iterator[RequestListener]:
    made = RequestListener("127.0.0.1", lambda request: {"got": request["asks"]}, lambda: None)
    made.start()
    yield made
    made.close()


def connected(at: Address) -> socket.socket:
    return socket.create_connection((at.host, at.port), timeout=5)


def sending(at: Address, text: bytes) -> list[socket.socket]:
    made = connected(at)
    with contextlib.suppress(OSError):  # it is cut off meanwhile
        made.sendall(text)
    return [made]


@stranger
def port_scan(at: Address) -> list[socket.socket]:
    for _ in range(50):
        connected(at).close()
    return []


@stranger
def reset(at: Address) -> list[socket.socket]:
    for _ in range(20):
        made = connected(at)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.close()
    return []


@stranger
def silent(at: Address) -> list[socket.socket]:
    return [connected(at)]


@stranger
def two_hundred_that_stay(at: Address) -> list[socket.socket]:
    return [connected(at) for _ in range(200)]


@stranger
def half_closed(at: Address) -> list[socket.socket]:
    made = sending(at, at.secret.encode()[:3])
    made[0].shutdown(socket.SHUT_WR)
    return made


@stranger
def one_byte_now_and_then(at: Address) -> list[socket.socket]:
    made = connected(at)
    with contextlib.suppress(OSError):
        for letter in at.secret.encode():
            made.sendall(bytes([letter]))
            time.sleep(0.1)
    return [made]


@stranger
def ten_megabytes(at: Address) -> list[socket.socket]:
    return sending(at, b"x" * 10_000_000)


@stranger
def ten_megabytes_of_one_who_knows_the_secret(at: Address) -> list[socket.socket]:
    return sending(at, at.secret.encode() + b" " * 10_000_000)


@stranger
def deep(at: Address) -> list[socket.socket]:
    return sending(at, b"[" * 200_000 + b"\n")


@stranger
def deep_of_one_who_knows_the_secret(at: Address) -> list[socket.socket]:
    return sending(at, at.secret.encode() + b"[" * 200_000 + b"]" * 200_000 + b"\n")


@stranger
def does_not_read_the_answer(at: Address) -> list[socket.socket]:
    made = connected(at)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    made.sendall(at.secret.encode() + json.dumps({"asks": "x" * 900_000}).encode() + b"\n")
    return [made]


def _texts() -> dict[str, Callable[[Address], bytes]]:
    request = json.dumps({"asks": "where"}).encode() + b"\n"
    return {
        "http": lambda at: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "tls": lambda at: bytes.fromhex("16030100c8010000c40303") + os.urandom(200),
        "ssh": lambda at: b"SSH-2.0-OpenSSH_9.6\r\n",
        "no_utf_8": lambda at: b"\xff\xfe\x80\n",
        "zeros": lambda at: bytes(5000),
        "an_empty_line": lambda at: b"\n",
        "another_job": lambda at: b"0123456789abcdef" + request,
        "the_secret_too_late": lambda at: request + at.secret.encode(),
        "a_list_of_one_who_knows_the_secret": lambda at: at.secret.encode() + b"[1]\n",
        "garbage_of_one_who_knows_the_secret": lambda at: at.secret.encode() + b"\xff{\n",
        "a_question_that_is_none": lambda at: at.secret.encode() + b'{"none": 1}\n',
    }


for _name, _text in _texts().items():
    STRANGERS[_name] = lambda at, text=_text: sending(at, text(at))


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_cut_off_and_a_rank_is_answered(listener: RequestListener, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_ones = STRANGERS[name](listener.address)
    assert ask({0: listener.address}, {"asks": 1}, T) == {0: {"got": 1}}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB
    deadline = time.monotonic() + 5 * T
    while listener._connections and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not listener._connections and listener._thread.is_alive()
    for each in open_ones:
        each.close()


def test_a_rank_is_answered_by_a_process_that_may_open_no_more_files(
    listener: RequestListener,
) -> None:
    asker = socket.socket()  # opened before
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 512), limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        asker.settimeout(T)
        asker.connect((listener.address.host, listener.address.port))
        asker.sendall(listener.address.secret.encode() + b'{"asks": 3}\n')
        assert json.loads(asker.recv(100)) == {"got": 3}
        assert ask({0: listener.address}, {"asks": 1}, 0.2) == {}  # it has no file to ask with
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        asker.close()
    assert ask({0: listener.address}, {"asks": 1}, T) == {0: {"got": 1}}


def test_the_thread_goes_on_whatever_a_turn_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object) -> None:
        failed.append(1)
        raise MemoryError

    failed: list[int] = []
    monkeypatch.setattr(listening._Request, "__init__", lambda self, secret: fails(self))
    made = RequestListener("127.0.0.1", lambda request: {"got": request["asks"]}, lambda: None)
    made.start()
    connected(made.address).close()
    while not failed:
        time.sleep(0.01)
    monkeypatch.undo()
    assert ask({0: made.address}, {"asks": 1}, T) == {0: {"got": 1}}
    made.close()


@pytest.mark.parametrize(
    "said", [b"[" * 100_000, b"[1]\n", b"1\n", b"\xff\n", b"", b"x" * 3_000_000], ids=range(6)
)
def test_what_another_program_answers_is_no_answer(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = Address("127.0.0.1", server.getsockname()[1], "secret", 1, "")

        def answer() -> None:
            with server.accept()[0] as other, contextlib.suppress(OSError):
                other.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask({0: at}, {"asks": 1}, T) == {0: None}
        thread.join()
