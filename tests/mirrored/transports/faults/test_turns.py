"""One thread of a rank communicates, one call at a time. What else tries to is refused, and the
call under way gives the right value."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import consistent
from consistent import Placement, S
from mirrored.transports.torch_dist import transport
from mirrored.transports.torch_dist.groups import world
from tests.mirrored.kinds import run
from tests.ranks import pool


def made(rank: int, n: int) -> consistent.GlobalTensor:
    placement = Placement("cpu", range(n))
    return consistent.distribute(torch.arange(4.0 * n).view(n, 4), placement, S(0))


def said_by(call: Callable[[], Any]) -> str:
    """What `call` raises; "" if nothing."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


# ---- calls in the middle of a call --------------------------------------------------------------


@contextmanager
def by_signal(call: Callable[[], None], done: Path) -> Iterator[None]:
    """`call` is run by the handler of a signal that comes while this rank waits for another one in
    the block; then the file `done` is there."""

    def handler(*_: Any) -> None:
        call()
        done.touch()

    before = signal.signal(signal.SIGUSR2, handler)
    sender = threading.Thread(target=_send_to_one_that_waits)
    sender.start()
    yield
    sender.join()
    signal.signal(signal.SIGUSR2, before)


def _send_to_one_that_waits() -> None:
    watch = world().watch
    assert watch is not None
    while watch._own_status_line().endswith("waits for no rank"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR2)


class Cycle:
    """Collected in a call: it has a finalizer, or a weak reference with a callback."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.itself, self.call = self, call

    def __del__(self) -> None:
        self.call()


@contextmanager
def by_collection(call: Callable[[], None], done: Path) -> Iterator[None]:
    def collect() -> None:
        Cycle(call)
        other = Cycle(lambda: None)
        refs.append(weakref.ref(other, lambda ref: call()))
        del other
        gc.callbacks.append(callback)
        gc.collect()
        gc.callbacks.remove(callback)

    def callback(phase: str, info: Any) -> None:
        call()

    refs: list[Any] = []
    with by_signal(collect, done):
        yield


def in_the_middle(rank: int, n: int, provoke: str, done: Path) -> list[str]:
    x, said = made(rank, n), list[str]()
    call = lambda: said.append(said_by(x.full))  # noqa: E731
    expected = x.sum().item()
    if rank == 0:
        with globals()[provoke](call, done):
            value = x.sum().item()
    else:
        while not done.exists():
            time.sleep(0.01)
        value = x.sum().item()
    assert value == expected == sum(range(4 * n))
    assert torch.equal(x.full(), torch.arange(4.0 * n).view(n, 4))
    return [text for text in said if text]


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
@pytest.mark.parametrize("provoke", ["by_signal", "by_collection"])
def test_a_call_in_the_middle_is_refused_and_the_call_goes_on(
    where: str, provoke: str, tmp_path: Path
) -> None:
    found = run(where, in_the_middle, 2, 2, provoke, tmp_path / "done")
    assert found[1] == [] and found[0]
    for text in found[0]:
        assert "while this rank is in the middle of" in text or "in the middle of another" in text


def save_in_a_handler(rank: int, kind: str) -> str:
    said: list[str] = []

    class Saver:
        def save(self, number: int, frame: Any) -> None:
            said.append(said_by(lambda: consistent.checkpoint.save("/nowhere", x=1)))

        __call__ = save

    handlers = {
        "method": Saver().save,
        "object": Saver(),
        "partial": partial(Saver.save, Saver()),
        "arguments": lambda *given: Saver().save(*given),
    }
    before = signal.signal(signal.SIGUSR2, handlers[kind])
    signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    return said[0]


@pytest.mark.parametrize("kind", ["method", "object", "partial", "arguments"])
def test_a_handler_is_told_what_to_do_wherever_it_runs(kind: str) -> None:
    for text in pool(2).run(save_in_a_handler, kind):
        assert "checkpoint.save is called by the handler of SIGUSR2" in text
        assert "on_signal" in text and "test_turns.py" in text


# ---- threads ------------------------------------------------------------------------------------


def two_threads(rank: int, n: int, others: int) -> tuple[int, list[str]]:
    """How many values were wrong, and what other threads were told."""
    x, wrong, said = made(rank, n), [0], list[str]()

    def read(k: int) -> None:
        for _ in range(20):
            value = (x + k).sum().item()
            wrong[0] += value != sum(range(4 * n)) + k * 4 * n

    threads = [
        threading.Thread(target=lambda k=k: said.append(said_by(lambda: read(k))), name=f"log {k}")
        for k in range(1, others + 1)
    ]
    for thread in threads:
        thread.start()
    read(0)
    for thread in threads:
        thread.join()
    return wrong[0], said


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
def test_a_second_thread_is_refused_and_no_value_is_wrong(where: str) -> None:
    for wrong, said in run(where, two_threads, 3, 3, 2):
        assert wrong == 0 and len(said) == 2
        for text in said:
            assert "thread 'log" in text and "'MainThread'" in text and "in read" in text


def refused_while_a_message_is_read(rank: int, n: int) -> tuple[float, str]:
    """A short message lies in memory that is used again. Another thread is refused just before this
    one reads what has come."""
    x, said = made(rank, n), list[str]()
    other = (x + 1).sum()

    def late(*args: Any, **kwargs: Any) -> torch.Tensor:
        thread = threading.Thread(target=lambda: said.append(said_by(other.item)))
        thread.start()
        thread.join()
        return ordered_reduce(*args, **kwargs)

    total = x.sum()
    transport.ordered_reduce, ordered_reduce = late, transport.ordered_reduce
    try:
        return total.item(), *said
    finally:
        transport.ordered_reduce = ordered_reduce


def test_a_thread_that_is_refused_writes_into_no_message() -> None:
    for value, text in run("gloo", refused_while_a_message_is_read, 3, 3):
        assert value == sum(range(12)) and "communicates, and on this rank" in text


def handed_over(rank: int, n: int) -> list[float]:
    """By a block; and to a thread after the one that communicated has ended."""
    x, sums = made(rank, n), list[float]()

    def read() -> float:
        return x.sum().item()

    def read_here() -> float:
        with consistent.in_this_thread():
            return read()

    with ThreadPoolExecutor(1) as workers:
        for _ in range(3):
            sums += [workers.submit(read_here).result(), read()]
        assert "ThreadPoolExecutor" in said_by(lambda: workers.submit(read).result())

    def at_once() -> None:
        with consistent.in_this_thread():
            entered.set()
            go_on.wait()

    entered, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=at_once)
    thread.start()
    entered.wait()
    assert said_by(read) and said_by(read_here)
    go_on.set()
    thread.join()
    return [*sums, read()]


def test_a_thread_that_says_so_communicates() -> None:
    assert pool(2).run(handed_over, 2) == [[28.0] * 7] * 2


def begun_in_a_thread(rank: int, n: int) -> list[float]:
    from mirrored.transports.faults.turns import claim_main_thread, turns

    x, sums = made(rank, n), list[float]()

    def first() -> None:
        claim_main_thread()
        sums.append(x.sum().item())
        done.set()
        end.wait()

    done, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    done.wait()
    assert said_by(x.full)
    end.set()
    thread.join()
    sums.append(x.sum().item())
    assert turns.thread == threading.get_ident()
    return sums


def test_another_thread_takes_over_from_one_that_has_ended() -> None:
    assert pool(2).run(begun_in_a_thread, 2) == [[28.0] * 2] * 2


def test_what_no_other_rank_takes_part_in_any_thread_may_do() -> None:
    x = consistent.distribute(torch.arange(4.0), Placement("cpu", [0]), S(0))
    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(lambda k: (x + k).sum().item(), range(8))) == [
            6.0 + 4 * k for k in range(8)
        ]
