"""Sockets of two ranks in one process: messages of every length in every order, and what is raised
where one does not come."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mirrored.transports import _C  # pyright: ignore[reportAttributeAccessIssue]

TIMEOUT_S = 1.0
SIZES = (0, 1, 15, 16, 80, 4097, 65_536, 1_000_003, 6_000_000)  # bytes, to more than a socket holds


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """Those of rank 0 and of rank 1."""
    made = [_C.Sockets(2, TIMEOUT_S, _C.Alarm()) for _ in range(2)]
    for source, to in ((0, 1), (1, 0)):
        leaves, arrives = socket.socketpair()
        made[source].leave_by(to, leaves.detach())
        made[to].arrive_by(source, arrives.detach())
    yield made[0], made[1]
    for each in made:
        each.close()


def numbers(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


def asked(sockets: Any, other: int, wanted: list[tuple[int, int]]) -> tuple[list[Tensor], list]:
    outs = [torch.full((size,), 7, dtype=torch.uint8) for _, size in wanted]
    return outs, [sockets.receive(other, tag, out) for (tag, _), out in zip(wanted, outs)]


@pytest.mark.parametrize("seed", range(6))
def test_messages_are_found_by_their_tags(pair: tuple[Any, Any], seed: int) -> None:
    chance = random.Random(seed)
    failed: list[BaseException] = []
    plans = [[(tag, chance.choice(SIZES)) for tag in range(20)] for _ in range(2)]
    orders = [chance.sample(range(20), 20) for _ in range(4)]

    def run(rank: int) -> None:
        try:
            mine, theirs, sockets = plans[rank], plans[1 - rank], pair[rank]
            sent = [
                sockets.send(1 - rank, mine[i][0], numbers(mine[i][1], rank * 100 + i))
                for i in orders[rank][:10]
            ]
            wanted = [theirs[i] for i in orders[2 + rank]]
            outs, messages = asked(sockets, 1 - rank, wanted[:5])
            sent += [
                sockets.send(1 - rank, mine[i][0], numbers(mine[i][1], rank * 100 + i))
                for i in orders[rank][10:]
            ]
            sockets.wait(messages)
            more, messages = asked(sockets, 1 - rank, wanted[5:])
            sockets.wait([*sent, *messages])
            for (tag, size), out in zip(wanted, [*outs, *more], strict=True):
                assert torch.equal(out, numbers(size, (1 - rank) * 100 + tag)), (tag, size)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_messages_of_one_tag_come_in_order(pair: tuple[Any, Any]) -> None:
    for k in range(5):
        pair[0].send(1, 3, torch.full((100,), k, dtype=torch.uint8))
    outs, messages = asked(pair[1], 0, [(3, 100)] * 5)
    pair[1].wait(messages)
    assert [int(out[99]) for out in outs] == [0, 1, 2, 3, 4]


def test_what_is_under_way_goes_on_while_nobody_waits(pair: tuple[Any, Any]) -> None:
    x = numbers(30_000_000, 1)
    outs, messages = asked(pair[1], 0, [(1, len(x))])
    pair[0].send(1, 1, x)
    deadline = time.monotonic() + 20
    while not torch.equal(outs[0][-100:], x[-100:]) and time.monotonic() < deadline:
        time.sleep(0.01)
    pair[1].wait(messages)
    assert torch.equal(outs[0], x)


def test_memory_is_kept_until_it_has_left_or_arrived(pair: tuple[Any, Any]) -> None:
    sent = [pair[0].send(1, k, numbers(3_000_000, k)) for k in range(4)]  # nobody else has it
    outs, messages = asked(pair[1], 0, [(k, 3_000_000) for k in range(4)])
    pair[1].wait(messages)
    pair[0].wait(sent)
    assert all(torch.equal(out, numbers(3_000_000, k)) for k, out in enumerate(outs))


def test_a_rank_that_ends_is_noticed_and_what_it_sent_arrives(pair: tuple[Any, Any]) -> None:
    pair[0].send(1, 1, numbers(100_000, 5))
    outs, messages = asked(pair[1], 0, [(1, 100_000), (2, 10)])
    pair[0].close()
    pair[1].wait(messages[:1])
    assert torch.equal(outs[0], numbers(100_000, 5))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        pair[1].wait(messages[1:])


def test_a_rank_that_never_sent_anything_and_ends_is_noticed() -> None:
    made = _C.Sockets(2, 30.0, _C.Alarm())
    leaves, other = socket.socketpair()
    made.leave_by(1, leaves.detach())
    _, messages = asked(made, 1, [(1, 10)])
    threading.Timer(0.1, other.close).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        made.wait(messages)
    assert time.monotonic() - start < 20
    made.close()


def test_who_waits_in_vain_raises(pair: tuple[Any, Any]) -> None:
    _, messages = asked(pair[1], 0, [(1, 10)])
    pair[0].send(1, 2, numbers(10, 1))  # another call
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        pair[1].wait(messages)


def test_another_length_raises(pair: tuple[Any, Any]) -> None:
    _, messages = asked(pair[1], 0, [(1, 10)])
    pair[0].send(1, 1, numbers(11, 1))
    with pytest.raises(RuntimeError, match="a message has another length"):
        pair[1].wait(messages)


def test_the_alarm_ends_a_wait() -> None:
    alarm = _C.Alarm()
    made = _C.Sockets(2, 30.0, alarm)
    leaves, other = socket.socketpair()
    made.leave_by(1, leaves.detach())
    _, messages = asked(made, 1, [(1, 10)])
    threading.Timer(0.1, alarm.set_off, args=("rank 1 gave up",)).start()
    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        made.wait(messages)
    made.close()
    other.close()


def test_what_is_received_is_contiguous(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="contiguous CPU memory"):
        pair[0].receive(1, 1, torch.zeros(4, 4).t())


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(16.0).view(4, 4).t(),
        torch.arange(4.0).expand(3, 4),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj().imag,
    ],
    ids=["transposed", "expanded", "conjugated", "negated"],
)
def test_what_is_sent_may_be_a_view_of_any_kind(pair: tuple[Any, Any], x: torch.Tensor) -> None:
    out = torch.empty(x.shape, dtype=x.dtype)
    sent, received = pair[0].send(1, 1, x), pair[1].receive(0, 1, out)
    pair[0].wait([sent])
    pair[1].wait([received])
    assert torch.equal(out, x)


_OWNED_BY_PYTHON = """
import socket, sys, time, torch
from mirrored.transports import _C
a, b = (_C.Sockets(2, 10.0, _C.Alarm()) for _ in range(2))
for source, to, at in ((a, b, 1), (b, a, 0)):
    leaves, arrives = socket.socketpair()
    source.leave_by(at, leaves.detach())
    to.arrive_by(1 - at, arrives.detach())
sys.setswitchinterval(1.0)  # Python's lock is kept for as long as it can be
short, tag = torch.zeros(8, dtype=torch.uint8), 0
for k in range(10):
    out = torch.empty(2_000_000, dtype=torch.uint8)
    message = b.receive(0, 2 * k, out)
    a.send(1, 2 * k, torch.frombuffer(bytearray(2_000_000), dtype=torch.uint8))  # nobody waits
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        tag += 1
        a.receive(1, tag, short)
    b.wait([message])
print("done", flush=True)
"""


def test_memory_that_python_owns_is_let_go_while_others_send_and_receive() -> None:
    # A thread that held the lock while it waited for Python's own stopped all others.
    done = subprocess.run(
        [sys.executable, "-c", _OWNED_BY_PYTHON], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "done\n", done.stderr
