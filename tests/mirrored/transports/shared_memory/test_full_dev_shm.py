"""A /dev/shm that is full, or gets full: ranks send messages, and all of them say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import free_port, launch

REFUSED = 77  # the exit status of a process that may not have a /dev/shm of its own

# One process has a /dev/shm of so many bytes, and forks the ranks, which share it.
PROGRAM = f"""
import ctypes, json, os, sys, warnings

NEW_MOUNTS, PRIVATE_BELOW = 0x20000, 0x44000
libc = ctypes.CDLL(None)
if libc.unshare(NEW_MOUNTS) or libc.mount(None, b"/", None, PRIVATE_BELOW, None):
    sys.exit({REFUSED})
size = ("size=" + sys.argv[1]).encode()
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, size) == 0

RANKS = 3
from tests.launch import of_rank

children = []
for rank in range(RANKS):
    child = os.fork()
    if child == 0:
        os.environ.update(of_rank(rank, RANKS, int(sys.argv[2])))
        break
    children.append(child)
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))

import torch, consistent, mirrored
import torch.distributed as dist
from consistent import B, P, S

told = []
warnings.showwarning = lambda text, *rest: told.append(str(text))
p = consistent.placement.all("cpu")
found = [consistent.from_local(torch.ones(3), p, P).to_global(sbp=B).to_local().sum().item()]
for count in (1000, 3_000_000):
    x = consistent.distribute(torch.arange(float(count)).double(), p, S(0))
    found += [x.full()[-1].item() == count - 1, x.sum().item() == count * (count - 1) / 2]
    own = torch.full((count,), dist.get_rank() + 1.0)
    with mirrored.current().peers(own, (0, 1, 2)) as views:
        found.append(sum(view[-1].item() for view in views))
net = consistent.parallelize(torch.nn.Linear(4, 4), p, plan="zero3")
net(consistent.distribute(torch.ones(6, 4), p, S(0))).sum().backward()
found.append(sum(w.grad.full().sum().item() for w in net.parameters()))
print(json.dumps([found, told]), flush=True)
os.environ.clear()
"""


# Not even the first segment has room; a larger one has none.
@pytest.mark.parametrize("size", ["4k", "8m"])
def test_ranks_send_messages_and_say_so(size: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = launch(program, size, str(free_port()), ranks=1)
    if done.status == REFUSED:
        pytest.skip("a process needs to be root to have a /dev/shm of its own")
    assert done.status == 0, done.errors
    said = [json.loads(line) for line in done.printed[0].splitlines()]
    assert len(said) == 3
    for found, told in said:
        assert found == [9.0, True, True, 6.0, True, True, 6.0, 120.0]
        assert told and all("cannot share memory" in each for each in told), told
        assert all("No space left on device" in each for each in told), told
