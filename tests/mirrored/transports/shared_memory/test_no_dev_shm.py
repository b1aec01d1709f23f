"""A host without /dev/shm: each rank sees an empty /dev of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

REFUSED = 77  # the exit status of a rank that may not have a /dev of its own

PROGRAM = f"""
import ctypes, os, stat, sys

NEW_MOUNTS, PRIVATE_BELOW = 0x20000, 0x44000
libc = ctypes.CDLL(None)
if libc.unshare(NEW_MOUNTS) or libc.mount(None, b"/", None, PRIVATE_BELOW, None):
    sys.exit({REFUSED})
assert libc.mount(b"tmpfs", b"/dev", b"tmpfs", 0, None) == 0 and not os.path.exists("/dev/shm")
os.mknod("/dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))

import torch, consistent
from consistent import B, P

shard = torch.tensor([int(os.environ["RANK"]) + 1.0])
x = consistent.from_local(shard, consistent.placement.all("cpu"), P)
print(x.to_global(sbp=B).to_local().item())
"""


def test_ranks_without_dev_shm_send_messages_and_say_what_to_do(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = launch(program, ranks=2)
    if done.status == REFUSED:
        pytest.skip("a process needs to be root to have a /dev of its own")
    assert done.status == 0, done.errors
    assert done.printed == ["3.0\n"] * 2
    for said in done.errors:
        assert said.count("cannot share memory") == 1
        assert "No such file or directory" in said and "Mount /dev/shm" in said
