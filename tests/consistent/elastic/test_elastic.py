"""Trainings that lose ranks, and get others, have the losses of one that nothing disturbs."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import statistics
import time
from pathlib import Path

import pytest

from tests.ranks import ALL

from .control import Run, children, undisturbed
from .places import LOGGED, PLACES

KILLS = int(os.environ.get("CONSISTENT_TEST_KILLS", "40"))

more = pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 runs it: minutes")


def check(run: Run, ended: int, *options: str) -> None:
    """All that came to the end have the losses of one process, and each step has one line."""
    assert run.end() == 0, run.text
    found = run.losses()
    assert len(found) == ended, run.text
    steps = ("--steps", str(len(found[0])), "--pause", "0")
    wanted = undisturbed(run.folder / "alone", *options, *steps)
    for losses in found:
        assert losses == pytest.approx(wanted, abs=1e-6), run.text
    assert [step for step, *_ in run.progress] == list(range(1, len(found[0]) + 1)), run.text


def test_a_death_and_one_while_ranks_recover_and_a_newcomer(tmp_path):
    rows = ("--rows", "12000")  # workers live for an epoch
    options = ("--workers", "1", "--late", "2", *rows)
    run = Run(tmp_path / "run", 4, *options, launcher=("--max-restarts", "1"))
    run.wait_until(lambda: len(run.progress) >= 2)
    # Ranks 0 and 1 hold all of the model, and so do ranks 2 and 3; they are started in this order.
    first, second, *left = run.ranks
    workers = {rank: children(rank) for rank in run.ranks}
    run.arm("recovery", process=second)
    run.arm("logged", process=first)  # all have finished the step, and its line is not written
    run.wait_until(lambda: run.text.count("was ended by SIGKILL.") == 2)
    run.wait_until_gone(workers[first] + workers[second], limit=1)
    run.wait_until(lambda: run.progress[-1][1] == 2)
    run.wait_until(lambda: run.progress[-1][1] == 3)
    assert [len(pids) for pids in workers.values()] == [1] * 4
    run.wait_until_gone(pid for rank in left for pid in workers[rank])
    run.wait_until(lambda: [len(children(rank)) for rank in left] == [1, 1])
    run.stop()
    check(run, 3, *rows)


@more
@pytest.mark.parametrize("compiled", [(), ("--compile",)], ids=["as written", "compiled"])
def test_a_death_at_each_place_and_a_rank_that_comes_in_its_stead(tmp_path, compiled):
    places = [p for p in PLACES * 2 if not compiled or p not in ("forward", "backward")] + [LOGGED]
    launcher = ("--max-restarts", str(len(places)))
    run = Run(tmp_path / "run", 4, *compiled, "--save-every", "20", launcher=launcher)
    for k, place in enumerate(places):
        count = len(run.progress)
        run.wait_until(lambda: len(run.progress) > count + 1 and run.progress[-1][1] > 2)  # noqa: B023
        run.arm(place)
        run.wait_until(lambda: run.is_taken(place))  # noqa: B023
        print(k, place)
    run.wait_until(lambda: run.text.count("was ended by SIGKILL.") == len(places))
    count = len(run.progress)  # the last line may be one of a step before that death
    run.wait_until(lambda: len(run.progress) > count + 1 and run.progress[-1][1] == 4)
    run.stop()
    check(run, 4, *compiled)


@more
def test_deaths_at_random_moments(tmp_path):
    run = Run(tmp_path / "run", 4, launcher=("--max-restarts", str(KILLS)))
    drawn, waits = random.Random(32), []
    for _ in range(KILLS):
        run.wait_until(lambda: bool(run.progress) and run.progress[-1][1] == 4)
        time.sleep(0.2 * drawn.random())
        before = run.progress[-1][2]
        os.kill(drawn.choice(run.ranks), signal.SIGKILL)
        run.wait_until(lambda: run.progress[-1][1] == 3)
        waits.append(next(t for _, size, t, _ in run.progress if size == 3 and t > before) - before)
    print(f"from the last step before to the first after: median {statistics.median(waits):.2f} s,")
    print(f"worst {max(waits):.2f} s")
    run.wait_until(lambda: run.progress[-1][1] == 4)
    run.stop()
    check(run, 4)


@more
def test_a_rank_that_is_stopped(tmp_path):
    run = Run(tmp_path / "run", 3, "--shards", "1", "--timeout", "3")
    run.wait_until(lambda: len(run.progress) >= 2)
    run.arm("backward", "SIGSTOP")
    run.wait_until(lambda: run.progress[-1][1] == 2)
    run.stop()
    check(run, 2)


@more
def test_a_rank_that_is_slow_is_left_out(tmp_path):
    run = Run(tmp_path / "run", 4, "--slow", "2")
    run.wait_until(lambda: bool(run.progress) and run.progress[-1][1] == 3)
    run.stop()
    check(run, 3)
    assert "rank 2 (process" in run.text and "and is left out." in run.text
    steps = [step for step, *_ in run.progress]
    assert steps == list(range(1, len(steps) + 1)) or len(steps) == steps[-1] - 1


@more
def test_holders_of_the_only_copies_die(tmp_path):
    options = ("--alone", "--shards", "1", "--save-every", "4")
    run = Run(tmp_path / "run", 3, *options)
    run.wait_until(lambda: len(run.progress) >= 6)
    run.arm("backward")
    run.wait_until(lambda: run.progress[-1][1] == 2)
    run.stop()
    assert run.end() == 0, run.text
    found = run.losses()
    wanted = undisturbed(tmp_path / "alone", "--pause", "0", "--steps", str(len(found[0])))
    assert all(losses == pytest.approx(wanted, abs=1e-6) for losses in found)
    assert "run again, from" in run.text


@more
def test_a_host_that_is_gone_and_comes_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts = ("--nnodes", "2", "--endpoint", f"127.0.0.1:{port}")
    first = Run(tmp_path / "run", 2, launcher=hosts)
    second = Run(tmp_path / "run", 2, launcher=(*hosts, "--node-rank", "1"))
    first.wait_until(lambda: len(first.progress) >= 3)
    gone = [second.process.pid, *second.ranks]
    for pid in gone:
        os.kill(pid, signal.SIGSTOP)
    first.wait_until(lambda: first.progress[-1][1] == 2)
    for pid in gone:
        os.kill(pid, signal.SIGCONT)
    assert second.end() == 1, second.text
    assert "Only the store's side goes on" in second.text
    assert "has been silent for 5.0 s" in first.text
    first.stop()
    check(first, 2)


@more
def test_peers_keep_what_lies_once(tmp_path):
    options = ("--alone", "--shards", "1", "--peers", "--every", "4")
    run = Run(tmp_path / "run", 3, *options)
    reached = []
    for size, place in ((2, "backward"), (1, "optimizer")):
        run.wait_until(lambda: len(run.progress) >= 6 and run.progress[-1][1] == size + 1)  # noqa: B023
        reached.append(len(run.progress))
        run.arm(place)
        run.wait_until(lambda: run.progress[-1][1] == size)  # noqa: B023
    run.stop()
    check(run, 1)
    after = [int(step) for step in re.findall("goes on after step ([0-9]+)", run.text)]
    assert [a > step - 4 for a, step in zip(after, reached, strict=True)] == [True, True], run.text


def test_what_lies_once_is_refused(tmp_path: Path):
    run = Run(tmp_path / "run", 2, "--alone", "--shards", "1")
    assert run.end() == 1
    assert 'job.placement({"dp": -1, "fsdp": 2})' in run.text
    assert "job.keep(folder=...)" in run.text
