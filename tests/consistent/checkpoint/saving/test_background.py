"""A save in the background that fails on one rank alone, wherever it does, fails on all of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consistent import checkpoint
from consistent.checkpoint import CheckpointError
from consistent.checkpoint.saving import folders, job
from tests.consistent.checkpoint.training import Training
from tests.ranks import pool

SAVE = sys.modules["consistent.checkpoint.save"]
BACKGROUND = sys.modules["consistent.checkpoint.saving.background"]

# Steps of a save that each rank does by itself, and where they are looked up.
STEPS: dict[str, tuple[Any, str]] = {
    "plan": (SAVE._planner, "plan_of"),
    "job": (SAVE, "_make_job"),
    "pieces": (SAVE, "data_of"),
    "copies": (SAVE._copies, "copy"),
    "memory": (sys.modules["consistent.checkpoint.saving.copies"], "_huge_pages"),
    "write": (BACKGROUND, "write_part"),
    "index": (job.index_file, "write"),  # rank 0 alone
    "rename": (folders, "finish"),
}
NEXT: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "wait": lambda folder, objects: checkpoint.wait(),
    "save": lambda folder, objects: checkpoint.save(folder, **objects, step=3, wait=False),
    "load": lambda folder, objects: checkpoint.load(folder, **objects),
    "latest": lambda folder, objects: checkpoint.latest(folder),
}


def _fail(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def _saves(rank: int, folder: str, step: str, bad: int, call: str, interrupts: bool) -> None:
    it, path = Training("rows"), Path(folder)
    checkpoint.save(path, **it.objects, step=1)
    SAVE._copies._memory = SAVE._copies._memory[:0]  # so that it asks for memory
    SAVE._copies._copies = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            error = KeyboardInterrupt() if interrupts else MemoryError("no room")
            patch.setattr(*STEPS[step], _fail(error))
        if interrupts and rank == bad:
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(path, **it.objects, step=2, wait=False)
        else:
            checkpoint.save(path, **it.objects, step=2, wait=False)
        words = "KeyboardInterrupt while it was copied" if interrupts else "MemoryError: no room"
        with pytest.raises(
            CheckpointError, match=f"in the background.*\n.*on rank {bad}: .*{words}"
        ):
            NEXT[call](path, it.objects)
    names = sorted(each.name for each in path.iterdir())
    assert rank or names == [".in-use", "step-00000001"], names  # rank 0 cleans up
    assert checkpoint.load(path, **it.objects) == {"step": 1}
    checkpoint.save(path, **it.objects, step=4, wait=False)
    assert checkpoint.load(path, **it.objects) == {"step": 4}


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_on_one_rank_raises_on_all(step: str, bad: int, tmp_path: Path) -> None:
    if bad == 0 or step not in ("index", "rename"):
        pool(3).run(_saves, str(tmp_path), step, bad, "wait", False)


@pytest.mark.parametrize("call", NEXT)
def test_each_next_call_says_that_a_copy_failed(call: str, tmp_path: Path) -> None:
    pool(2).run(_saves, str(tmp_path), "copies", 1, call, False)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_interrupt_of_one_rank_while_it_copies_is_told_to_others(
    bad: int, tmp_path: Path
) -> None:
    pool(2).run(_saves, str(tmp_path), "copies", bad, "wait", True)


def _saves_at_once(rank: int, folder: str, step: str) -> None:
    it, path = Training("rows"), Path(folder)
    checkpoint.save(path, **it.objects, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(*STEPS[step], _fail(MemoryError("no room")))
        with pytest.raises(CheckpointError, match="on rank 1: MemoryError: no room"):
            checkpoint.save(path, **it.objects, step=2)
    assert checkpoint.load(path, **it.objects) == {"step": 1}


@pytest.mark.parametrize("step", ["plan", "job", "pieces"])
def test_a_save_that_waits_raises_on_all_ranks_too(step: str, tmp_path: Path) -> None:
    pool(2).run(_saves_at_once, str(tmp_path), step)


def _without_threads(rank: int, folder: str, bad: list[int]) -> None:
    it = Training("rows")
    with pytest.MonkeyPatch.context() as patch:
        if rank in bad:
            start = threading.Thread.start

            def refuse(thread: threading.Thread) -> None:
                if thread.name == "consistent-checkpoint":
                    raise RuntimeError("can't start new thread")
                start(thread)

            patch.setattr(threading.Thread, "start", refuse)
        checkpoint.save(folder, **it.objects, step=1, wait=False)
        checkpoint.wait()
    assert checkpoint.load(folder, **it.objects) == {"step": 1}


@pytest.mark.parametrize("bad", [[0], [1], [0, 1]])
def test_a_rank_that_gets_no_thread_writes_before_save_returns(
    bad: list[int], tmp_path: Path
) -> None:
    pool(2).run(_without_threads, str(tmp_path), bad)


def test_an_interrupt_of_a_rank_that_is_alone_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SAVE._copies, "copy", _fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, value=1, step=1, wait=False)
    checkpoint.save(tmp_path, value=2, step=2, wait=False)
    assert checkpoint.load(tmp_path)["value"] == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == [".in-use", "step-00000002"]
