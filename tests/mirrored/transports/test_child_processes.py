"""Children that end, that join a group of their own, or that have a launched rank's environment."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.launch import Started

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import mirrored

rank, folder = int(sys.argv[1]), sys.argv[2]

def join(name, rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2,
        timeout=timedelta(seconds=20),
    )

def total():
    return mirrored.all_reduce(torch.ones(1), (0, 1)).item()

def ends(pid):
    # The group is used all the while, as often by both ranks.
    status, deadline = 0, time.monotonic() + 10
    for k in range(200):
        assert total() == 2
        time.sleep(0.005)
    while not status and time.monotonic() < deadline:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = found and os.waitstatus_to_exitcode(code)
        time.sleep(0.01)
    return status or "it did not end"

assert mirrored.current().size == 1
grandchild = os.fork()
if grandchild == 0:  # of a process without a group: it may have one
    join("children", rank)
    assert total() == 2
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 5

join("parents", rank)
assert total() == 2
said = []
for how in ("exit", "kill", "own group"):
    pid = os.fork()
    if pid == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "own group":
            dist.destroy_process_group()
            join("others", rank)
            assert total() == 2
            os._exit(7)
        sys.exit(3)
    said.append(ends(pid))
print(*said, flush=True)
print(os.getpid())
"""


def test_children_that_end_or_have_a_group_do_not_disturb_their_parents(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [
        Started(program, str(rank), str(tmp_path), environment=environment) for rank in range(2)
    ]
    deadline = time.monotonic() + 60
    for rank in ranks:
        rank.wait(max(0.0, deadline - time.monotonic()))
        rank.kill()
    said = [rank.printed.splitlines() for rank in ranks]
    assert [lines[0] for lines in said] == ["3 -9 7"] * 2, [rank.errors for rank in ranks]
    pids = [int(lines[1]) for lines in said]
    assert not [name for pid in pids for name in glob.glob(f"/dev/shm/consistent-*-{pid}-*")]


LAUNCHED = """
import multiprocessing as mp, os, subprocess, sys
import mirrored, torch

def worker(queue):
    try:
        mirrored.all_reduce(torch.ones(1), (0, 1))
    except RuntimeError as error:
        queue.put((mirrored.current().rank, mirrored.current().size, str(error)))

def child_of(method):
    queue = mp.get_context(method).SimpleQueue()
    process = mp.get_context(method).Process(target=worker, args=(queue,))
    process.start()
    found = queue.get()
    process.join()
    return found

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        rank, size, said = child_of(method)
        assert (rank, size) == (1, 2) and "is a child of rank 1" in said, (method, said)
    alone = "import mirrored; t = mirrored.current(); print(t.rank, t.size)"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
    print(done.stdout.strip())
"""


def test_children_of_a_launched_rank_do_not_take_its_place(tmp_path: Path) -> None:
    """They have the environment by which their parent would join; a program of its own is alone."""
    (tmp_path / "program.py").write_text(LAUNCHED)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | launched | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("0 1\n", 0), done.stderr
