"""Asking processes that answer, have ended, are silent, or are asked by somebody else."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mirrored.transports.faults import wire
from mirrored.transports.faults.listener import RequestListener
from mirrored.transports.faults.wire import Address, ask, own_host


@pytest.fixture
def listener() -> Iterator[RequestListener]:
    made = RequestListener("127.0.0.1", lambda request: {"got": request["asks"]}, lambda: None)
    made.start()
    yield made
    made.close()


def test_each_answers_for_itself(listener: RequestListener) -> None:
    other = RequestListener("127.0.0.1", lambda request: {"other": "x" * 100_000}, lambda: None)
    other.start()
    answers = ask({3: listener.address, 5: other.address}, {"asks": "where"}, 5.0)
    other.close()
    assert answers == {3: {"got": "where"}, 5: {"other": "x" * 100_000}}


def test_one_that_has_closed_is_told_from_one_that_is_silent(listener: RequestListener) -> None:
    closed = RequestListener("127.0.0.1", lambda request: {}, lambda: None)
    closed.start()
    closed.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        at = {1: closed.address, 2: replace(closed.address, port=port), 3: listener.address}
        assert ask(at, {"asks": 1}, 1.0) == {1: None, 3: {"got": 1}}


def test_only_who_knows_the_secret_is_answered(listener: RequestListener) -> None:
    assert ask({0: replace(listener.address, secret="guess")}, {}, 2.0) == {0: None}


@pytest.mark.parametrize(
    "sent", [b"", b"\n", b"{}\n", b"[1]\n", b"\xff\n", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_it_goes_on_after_a_request_that_is_none(listener: RequestListener, sent: bytes) -> None:
    with socket.create_connection((listener.address.host, listener.address.port)) as asker:
        asker.sendall(sent)
        asker.shutdown(socket.SHUT_WR)
        assert asker.recv(100) == b""
    assert ask({0: listener.address}, {"asks": 1}, 2.0) == {0: {"got": 1}}


def test_the_thread_looks_again_until_it_need_not_and_ends() -> None:
    before, looks = threading.active_count(), list[float]()

    def look() -> float | None:
        looks.append(time.monotonic())
        return 0.01 if len(looks) < 3 else None

    made = RequestListener("127.0.0.1", lambda request: {}, look)
    made.start()
    deadline = time.monotonic() + 5
    while len(looks) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(looks) == 3 and threading.active_count() == before + 1
    made.close()
    assert threading.active_count() == before


def test_an_address_knows_whether_its_process_lives_is_stopped_or_is_another() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    _, started = wire.state_and_start(child.pid)
    address = Address("127.0.0.1", 1, "", child.pid, started)
    assert address.state() in ("R", "S", "D")
    child.send_signal(19)
    deadline = time.monotonic() + 5
    while address.state() != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert address.state() == "T"
    child.kill()
    child.wait()
    assert address.state() == "" and replace(address, pid=os.getpid()).state() == ""


def test_own_host_is_that_by_which_the_store_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_host("127.0.0.1") == "127.0.0.1"
    assert own_host("no such host.invalid") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert own_host("192.0.2.1") == "127.0.0.1"


def test_an_address_of_another_machine_is_listened_for_on_all() -> None:
    made = RequestListener(
        "192.0.2.1", lambda request: {"here": 1}, lambda: None
    )  # behind a router
    made.start()
    assert made.address.host == "192.0.2.1"
    assert ask({0: replace(made.address, host="127.0.0.1")}, {}, 2.0) == {0: {"here": 1}}
    made.close()


def test_a_rank_to_which_no_network_leads_is_left_out(
    listener: RequestListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as where a link is down; it is not said to have ended."""
    away = replace(listener.address, host="192.0.2.1")
    connect = socket.socket.connect_ex

    def unreachable(self: socket.socket, at: tuple[str, int]) -> int:
        return errno.ENETUNREACH if at[0] == away.host else connect(self, at)

    monkeypatch.setattr(wire.socket.socket, "connect_ex", unreachable)
    assert ask({0: listener.address, 1: away}, {"asks": 1}, 5.0) == {0: {"got": 1}}
