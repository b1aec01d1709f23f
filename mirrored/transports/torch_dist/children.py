"""Keeps child processes of a rank from communicating in its place.

A child has the rank's environment, and a forked one has copies of its parent's connections and maps
the memory that the parent shares with other ranks. If it communicated, it would do so in its
parent's place, and its parent would find the group broken. So a child may do everything that needs
no other rank; any call that needs one raises until the child has joined a process group of its own.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d

from ...comm import Ranks

_LAUNCHER_VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_RANK_PROCESS = "CONSISTENT_RANK_PROCESS"  # in the environment of a rank that a launcher started

inherited: Any = object()
"""Default process group that this process inherited by a fork, if there is one."""


def started_by_launcher() -> bool:
    """Return whether torchrun or a similar launcher started this process as one of several."""
    is_launched = (
        all(name in os.environ for name in _LAUNCHER_VARIABLES) and os.environ["WORLD_SIZE"] != "1"
    )
    return is_launched and not is_child_of_rank()


def is_child_of_rank() -> bool:
    """Return whether this process inherited its environment from a rank of a launcher."""
    mark = os.environ.get(_RANK_PROCESS)
    if mark is None:
        return False
    pid, _, launch = mark.partition(" ")
    return launch == _launch_identity() and pid != str(os.getpid())


def mark_as_rank(rank: int, size: int) -> None:
    """Mark this process as a rank, by environment variables with its pid.

    A child process inherits them. It sees that the pid is not its own, and so knows that it is not
    a rank itself.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ[_RANK_PROCESS] = f"{os.getpid()} {_launch_identity()}"


def unmark_as_rank() -> None:
    """Remove the environment variables of ``mark_as_rank``: this process is no rank any more."""
    for name in (_RANK_PROCESS, "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def _launch_identity() -> str:
    """Return a text that identifies the launch (one start of torchrun) this process belongs to.

    It is the same for a rank and its child processes. Ranks of a launcher that is started inside a
    child process have another one.
    """
    return " ".join(
        os.environ.get(name, "") for name in (*_LAUNCHER_VARIABLES, "TORCHELASTIC_RUN_ID")
    )


def refuse_in_child(rank: int, ranks: Ranks) -> None:
    """Raise RuntimeError: a child process of ``rank`` tries to communicate over ``ranks``."""
    raise RuntimeError(
        f"process {os.getpid()} is a child of rank {rank}, and is to communicate over ranks "
        f"{tuple(ranks)}.\n"
        "  A child is not a rank. It has copies of its parent's connections and shared memory; if "
        "it used them, its parent would wait in vain.\n"
        "  Give it plain tensors, x.full() or x.to_local(). One that was started by spawn (in a "
        "DataLoader: multiprocessing_context='spawn') may join a process group of its own."
    )


def keep_alive(obj: Any) -> None:
    """Keep ``obj`` from ever being destroyed in this process.

    A process group joins its threads when it is destroyed. In a forked child these threads do not
    run, so the child would wait for them forever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _after_fork() -> None:
    global inherited
    # torch's group is still set in the child; it may be replaced later by a group of the child's
    # own.
    if c10d.GroupMember.WORLD is not None:
        inherited = c10d.GroupMember.WORLD


if started_by_launcher():
    os.environ[_RANK_PROCESS] = f"{os.getpid()} {_launch_identity()}"
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
