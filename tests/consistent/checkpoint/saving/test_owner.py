"""A folder belongs to one job as long as it lives, and not for longer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from consistent import B, Placement, checkpoint, distribute
from consistent.checkpoint import CheckpointError
from consistent.checkpoint.saving import owner
from tests.ranks import pool


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(owner, "_SILENCE_LIMIT_S", 0.5)
    monkeypatch.setattr(owner, "_EXIT_GRACE_S", 0.3)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / ".in-use")
    yield path
    owner.release(path)


def _in_child(step: Callable[[], Any], then: Callable[[], Any] = lambda: None) -> int:
    """A forked child that carries out ``step`` and then ``then``; returns when it has done the
    first. It ends with status 1 if it raises."""
    told, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        os.read(told, 1)
        os.close(told)
        return child
    status = 1
    try:
        step()
        os.write(tell, b".")
        then()
        status = 0
    finally:
        os._exit(status)


def _end(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_the_first_owns_it_until_it_is_killed(mark: str) -> None:
    child = _in_child(lambda: owner.claim(mark), lambda: time.sleep(60))
    try:
        with pytest.raises(RuntimeError, match=rf"another job saves there: process {child} on .*, "
                           rf"since 20\d\d-.* a path of its own.*{mark} is its mark"):  # fmt: skip
            owner.claim(mark)
    finally:
        _end(child)
    began = time.monotonic()
    owner.claim(mark)
    owner.claim(mark)
    assert owner.owns(mark) and time.monotonic() - began < 0.3  # nothing was waited for
    owner.release(mark)
    assert not os.path.exists(mark)


def test_who_ends_leaves_nothing_and_a_forked_child_owns_nothing(mark: str) -> None:
    owner.claim(mark)
    held: list[Any] = []

    def child() -> None:
        assert not owner.owns(mark)
        with pytest.raises(RuntimeError, match=f"process {os.getppid()} on"):
            owner.claim(mark)
        owner._release_all()  # as at its exit

    assert os.waitpid(_in_child(child), 0)[1] == 0
    assert owner.owns(mark) and not held
    owner._release_all()
    assert not os.path.exists(mark)


def _written(mark: str, **changed: Any) -> None:
    """The mark of a process of another host, or what else it is."""
    whole = dict(host="far", pid=7, began="3", system="x pid:[1]", since="2026-01-02 03:04:05",
                 token="t")  # fmt: skip
    Path(mark).write_text(json.dumps({**whole, **changed}))


def test_an_owner_of_another_host_lives_while_it_touches_its_mark(mark: str) -> None:
    _written(mark)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(mark)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="process 7 on far, since 2026-01-02 03:04:05"):
            owner.claim(mark)
    finally:
        done.set()
        thread.join()
    owner.claim(mark)
    assert owner.owns(mark)


def test_its_own_process_touches_it(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_HEARTBEAT_S", 0.05)

    def child() -> None:
        owner.claim(mark)
        os.utime(mark, (1, 1))

    holder = _in_child(child, lambda: time.sleep(60))
    monkeypatch.setattr(owner, "_system_id", lambda: "another")  # as seen from elsewhere
    try:
        with pytest.raises(RuntimeError, match=f"process {holder} on"):
            owner.claim(mark)
        assert os.stat(mark).st_mtime > 1
    finally:
        _end(holder)
    owner.claim(mark)


def test_another_process_of_the_same_number_is_not_the_owner(mark: str) -> None:
    _written(mark, pid=os.getppid(), system=owner._system_id())
    owner.claim(mark)
    assert owner.owns(mark)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"pid": 3}', "[" * 4000, "\x00\xff", '{"pid": ' + "9" * 4000 + "}"],
)
def test_a_mark_that_says_nothing_is_that_of_a_dead_job(mark: str, text: str) -> None:
    Path(mark).write_text(text)
    owner.claim(mark)
    assert owner.owns(mark)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "link to itself"])
def test_what_lies_in_the_way_is_named_and_not_waited_for(mark: str, kind: str) -> None:
    if kind == "folder":
        os.mkdir(mark)
    elif kind == "pipe":
        os.mkfifo(mark)
    else:
        os.symlink("/nowhere" if kind == "link" else mark, mark)
    with pytest.raises(OSError, match=r"\.in-use"):
        owner.claim(mark)
    assert os.path.lexists(mark)


def test_of_many_that_find_a_dead_owner_one_becomes_the_next(mark: str) -> None:
    _written(mark, pid=os.getppid(), system=owner._system_id())
    begun, ready, end = os.pipe(), os.pipe(), os.pipe()

    def child() -> None:
        os.close(begun[1])
        os.close(end[1])
        os.read(begun[0], 1)  # until all are there
        try:
            owner.claim(mark)
        finally:
            os.write(ready[1], b"x")
            os.read(end[0], 1)  # until all have tried

    children = [_in_child(lambda: None, child) for _ in range(8)]
    os.close(begun[1])
    tried = 0
    while tried < len(children):
        tried += len(os.read(ready[0], 8))
    os.close(end[1])
    statuses = [os.waitpid(each, 0)[1] for each in children]
    assert statuses.count(0) == 1, statuses


def test_who_was_stopped_too_long_learns_that_it_lost_it(mark: str) -> None:
    owner.claim(mark)
    _written(mark)
    with pytest.raises(RuntimeError, match="another job has begun to save there.*process 7 on far"):
        owner.check(mark)


def test_two_threads_may_give_it_up_at_once(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interrupt: save gives the folder up, and so does the thread that was to write."""
    owner.claim(mark)
    read = owner._read_mark

    def while_another_releases(path: str) -> Any:
        monkeypatch.setattr(owner, "_read_mark", read)
        found = read(path)
        owner.release(path)
        return found

    monkeypatch.setattr(owner, "_read_mark", while_another_releases)
    owner.release(mark)
    assert not owner.owns(mark) and not os.path.exists(mark)
    owner.claim(mark)
    assert owner.owns(mark)


def test_a_program_with_ever_new_folders_owns_the_last_ones(tmp_path: Path) -> None:
    marks = [str(tmp_path / str(k)) for k in range(owner._MAX_MARKS + 3)]
    for each in marks:
        owner.claim(each)
    assert [owner.owns(each) for each in marks] == [False] * 3 + [True] * owner._MAX_MARKS
    for each in marks:
        owner.release(each)


def _save(rank: int, folder: str, wait: bool) -> str:
    path = checkpoint.save(folder, value=1, step=1, wait=wait, random=False)
    checkpoint.wait()
    return path


def _refused(rank: int, folder: str, wait: bool) -> list[str]:
    x = distribute(torch.ones(3), Placement.all("cpu"), B)
    said = []
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save(folder, value=2, step=1, wait=wait, random=False)
    said.append(str(raised.value))
    if rank == 0:
        Path(folder, "x.pt.in-use").write_bytes(Path(folder, ".in-use").read_bytes())
    with pytest.raises(CheckpointError) as raised:
        checkpoint.save_full(torch.nn.ParameterDict({"x": x}), f"{folder}/x.pt")
    said.append(str(raised.value))
    assert checkpoint.load(folder) == {"value": 1, "step": 1}
    return said


@pytest.mark.parametrize("wait", [True, False])
def test_the_second_job_is_told_on_all_its_ranks(tmp_path: Path, wait: bool) -> None:
    first = pool(2).run(_save, str(tmp_path), wait)[0]
    pid = json.loads((tmp_path / ".in-use").read_text())["pid"]
    for said in pool(3).run(_refused, str(tmp_path), wait):
        assert all(f"on rank 0: another job saves there: process {pid} on" in text for text in said)
    assert not list(tmp_path.glob(".saving*"))
    again = pool(2).run(_save, str(tmp_path), wait)[0]  # the first one goes on
    assert Path(first).exists() and Path(again).exists()
