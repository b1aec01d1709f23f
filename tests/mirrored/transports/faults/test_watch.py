"""One message for all: who speaks, whose words are taken over, what is said of who is silent."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from mirrored.transports import _C  # pyright: ignore[reportAttributeAccessIssue]
from mirrored.transports.faults import directory
from mirrored.transports.faults.directory import Rank
from mirrored.transports.faults.store import LimitedStore
from mirrored.transports.faults.watch import Watch, WatchedCall
from tests.launch import Started

CALL = WatchedCall("all_gather", torch.float32, (2, 3), (0, 1, 2))


def rank_of(rank: int, size: int, store: object) -> Rank:
    return Rank(rank, size, LimitedStore(store, 10.0), "127.0.0.1")


def watch_of(me: Rank) -> Watch:
    """That of a rank which no messages reach."""
    return Watch(me, _C.Alarm(), lambda rank, file: None)


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    """Three ranks in one process, which know each other."""
    store = dist.HashStore()
    made = [watch_of(rank_of(rank, 3, store)) for rank in range(3)]
    deadline = time.monotonic() + 10
    while any(w._directory._missing_ranks() for w in made) and time.monotonic() < deadline:
        time.sleep(0.01)
    yield made
    for watch in made:
        watch.close()


def in_threads(*bodies: Callable[[], None]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_are_told_and_raise_from_then_on(watches: list[Watch]) -> None:
    words = watches[1].give_up("rank 1 has waited 3.0 s")
    assert words.startswith("rank 1 has waited 3.0 s, so every rank stops.\n")
    for rank, watch in enumerate(watches):
        assert re.search(rf"^    rank {rank}: .*test_watch.py:\d+ in ", words, re.MULTILINE)
        with pytest.raises(RuntimeError, match="rank 1 has waited 3.0 s"):
            watch.check()
        assert watch.give_up("later") == words


@pytest.mark.parametrize("run", range(5))
def test_those_who_give_up_together_say_the_same(watches: list[Watch], run: int) -> None:
    said: dict[int, str] = {}

    def give_up(rank: int) -> None:
        said[rank] = watches[rank].give_up(f"rank {rank} gave up")

    in_threads(*(lambda rank=rank: give_up(rank) for rank in range(3)))
    assert len(set(said.values())) == 1, said
    assert len({watch.alarm.words for watch in watches}) == 1


def test_a_wait_that_fails_is_told_with_its_call(watches: list[Watch]) -> None:
    def fail() -> None:
        raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer. Look elsewhere.")

    with pytest.raises(RuntimeError) as raised:
        watches[2].run_watched(CALL, fail)
    assert "rank 2 has waited 0.0 s in all_gather of float32[2, 3] over ranks (0, 1, 2)" in str(
        raised.value
    )
    assert "(Connection closed by peer), so every rank stops" in str(raised.value)
    with pytest.raises(RuntimeError, match="rank 2 has waited"):
        watches[0].run_watched(CALL, lambda: pytest.fail("it is not begun"))
    assert not watches[2]._message_waits and not watches[0]._message_waits


def test_other_errors_and_results_pass(watches: list[Watch]) -> None:
    assert watches[0].run_watched(CALL, lambda: 7) == 7
    with pytest.raises(ValueError, match="mine"):
        watches[0].run_watched(CALL, lambda: (_ for _ in ()).throw(ValueError("mine")))
    assert watches[0].alarm.words is None and watches[1].alarm.words is None


def test_an_interrupt_is_raised_and_the_others_are_told(watches: list[Watch]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watches[0].run_watched(CALL, interrupted)
    assert "(it was interrupted), so every rank stops" in watches[1].alarm.words


def test_who_waits_says_for_how_long_and_in_what(watches: list[Watch]) -> None:
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait()

    waiting = threading.Thread(target=watches[1].run_watched, args=(CALL, wait))
    waiting.start()
    begun.wait()
    words = watches[0].give_up("rank 0 gave up")
    end.set()
    waiting.join()
    assert re.search(r"rank 1: .* waits \d\.\d s in all_gather of float32\[2, 3\]", words)
    assert re.search(r"rank 2: .* waits for no rank", words)


def test_a_process_that_was_never_heard_of_is_said_to_be_so() -> None:
    watch = watch_of(rank_of(0, 2, dist.HashStore()))
    assert "rank 1: has not communicated yet" in watch.give_up("rank 0 gave up")
    watch.close()


LEAVES = """
import sys, time
from mirrored.transports import _C
import torch.distributed as dist
from mirrored.transports.faults.directory import Rank
from mirrored.transports.faults.store import LimitedStore
from mirrored.transports.faults.watch import Watch

def work():
    {body}

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
me = Rank(1, 2, LimitedStore(store, 10.0), "127.0.0.1")
watch = Watch(me, _C.Alarm(), lambda rank, file: None)
while not store.check(["go"]) or watch._directory._missing_ranks():
    time.sleep(0.01)
work()
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", r"process \d+ has ended: its program is done"),
        (
            "raise ValueError('no batch')",
            r"process \d+ has ended: ValueError: no batch, at .*:10 in work",
        ),
        (
            "import os; os._exit(0)",
            r"process \d+ has ended and left no word: it was killed or crashed",
        ),
        ("watch.close(); time.sleep(60)", r"process \d+ has left the process group"),
    ],
)
def test_why_a_process_is_not_there_any_more(body: str, said: str, tmp_path: object) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = f"{tmp_path}/program.py"
    with open(program, "w") as file:
        file.write(LEAVES.format(body=body))
    process = Started(program, str(store.port))
    watch = watch_of(rank_of(0, 2, store))
    deadline = time.monotonic() + 30
    while not store.check(["address/1"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    store.set("go", "")
    if "sleep" not in body:
        process.wait(20)
    while "rank 1: /" in (words := watch._error_message("", "", *_asked(watch))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    watch.close()
    assert re.search(f"rank 1: {said}", words), words


def _asked(watch: Watch) -> tuple:
    from mirrored.transports.faults.wire import ask

    others = watch._directory.refresh(10.0)
    return others, ask(others, {"asks": "where", "rank": 0}, 2.0)


class Deaf:
    """A store whose process does not answer before the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.over.wait()
        return False

    def set(self, key: str, value: str) -> None: ...


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    address, store, threads = directory.Address("127.0.0.1", 1, "", 1, ""), Deaf(), set()
    limited = LimitedStore(store, 0.1)
    found = directory.Directory(Rank(0, 2, limited, None), address)
    assert found.begin_refresh() is not None
    for _ in range(3):
        assert found.refresh(0.1) == {}  # it returns, though the store has not
        with pytest.raises(RuntimeError, match="Timed out waiting"):
            limited.ask(lambda store: store.check([]))
        threads |= {each for each in threading.enumerate() if each.name == "mirrored-store"}
    assert len(threads) == 1

    def stops() -> None:
        raise RuntimeError("rank 1 gave up")

    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        limited.ask(lambda store: store.check([]), 10.0, stops)
    store.over.set()
