"""A process that a rank starts is not a rank, though it has the rank's environment or its memory.

A forked child has copies of its parent's connections and maps the memory that the parent shares
with other ranks. If it communicated, it would do so in its parent's place, and its parent would
find the group broken. So a child may do everything that needs no other rank; what needs one raises
until the child has joined a process group of its own.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d

from ...comm import Ranks

_LAUNCHED = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_MARK = "CONSISTENT_RANK_PROCESS"  # in the environment of a rank that a launcher started

inherited: Any = object()
"""The default process group that this process got from its parent by a fork, if there is one."""


def started_by_launcher() -> bool:
    """Whether torchrun, or a launcher like it, started this process as one of several ranks."""
    launched = all(name in os.environ for name in _LAUNCHED) and os.environ["WORLD_SIZE"] != "1"
    return launched and not is_child_of_rank()


def is_child_of_rank() -> bool:
    """Whether this process inherited its environment from a rank that a launcher had started."""
    mark = os.environ.get(_MARK)
    if mark is None:
        return False
    pid, _, launch = mark.partition(" ")
    return launch == _launch() and pid != str(os.getpid())


def mark(rank: int, size: int) -> None:
    """Say in the environment which rank this process is, so that processes that it starts know that
    they are none."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ[_MARK] = f"{os.getpid()} {_launch()}"


def unmark() -> None:
    """This process is no rank from now on."""
    for name in (_MARK, "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def _launch() -> str:
    """The launch that this process belongs to: the same for a rank and its children, another one
    for ranks that a launcher starts inside a child."""
    return " ".join(os.environ.get(name, "") for name in (*_LAUNCHED, "TORCHELASTIC_RUN_ID"))


def refuse(rank: int, ranks: Ranks) -> None:
    """Raise RuntimeError: a child may not communicate."""
    raise RuntimeError(
        f"process {os.getpid()} is a child of rank {rank}, and is to communicate over ranks "
        f"{tuple(ranks)}.\n"
        "  A child is not a rank. It has copies of its parent's connections and shared memory; if "
        "it used them, its parent would wait in vain.\n"
        "  Give it plain tensors, x.full() or x.to_local(). One that was started by spawn (in a "
        "DataLoader: multiprocessing_context='spawn') may join a process group of its own."
    )


def keep_alive(obj: Any) -> None:
    """Keep `obj` from ever being destroyed in this process. A process group joins its threads when
    it is destroyed. In a forked child they do not run, so it would wait for them forever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _after_fork() -> None:
    global inherited
    if c10d.GroupMember.WORLD is not None:
        inherited = c10d.GroupMember.WORLD


if started_by_launcher():
    os.environ[_MARK] = f"{os.getpid()} {_launch()}"
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
