"""Lets a process leave a process group that lost a rank, and enter the next one without a restart.

```
enter(store, 2, 4, 30.0)    a process group of four, over a part of the store that is its own
why_broken()                why nothing can be sent any more; None while all is well
leave()                     the process is in no group
enter(store, 1, 3, 30.0, is_first=False)    the next one
```

Gloo connects its ranks only when one of its own collectives is called, which the library does not:
a rank that dies while others enter leaves none of them waiting.

If ranks may be lost, GPUs communicate by NCCL, from whose kernels they can be released
(``overdue.py``). They do not read each other's memory: a GPU that waits in a barrier of such memory
is released only when its process ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import children
from .groups import end_world, existing_world, reset_group_names, world
from .launcher import select_gpu
from .overdue import tame_watchdog

_LAZY_INIT = "TORCH_GLOO_LAZY_INIT"


def enter(
    store: Any,
    rank: int,
    size: int,
    timeout_s: float,
    *,
    is_first: bool = True,
    may_lose_ranks: bool = True,
) -> None:
    """Join the process group of ``size`` ranks that find each other in ``store``.

    No rank waits for another.

    Args:
        store: a store that no other process group uses.
        rank: this process's rank.
        size: the number of ranks.
        timeout_s: the timeout of the process group.
        is_first: whether it is the program's first process group. In later ones ranks do not
            measure which way of sending is faster (``tuning/``), because training waits meanwhile.
        may_lose_ranks: whether this process goes on in another process group when ranks are lost.
    """
    reset_group_names()
    select_gpu()
    if may_lose_ranks:
        tame_watchdog()
    with _lazy_connections():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    children.mark_as_rank(rank, size)
    state = world()
    state.may_measure = is_first
    if may_lose_ranks:
        state.may_lose_ranks()


@contextmanager
def _lazy_connections() -> Iterator[None]:
    """Context manager in which new gloo groups connect ranks only when they first communicate."""
    previous_value = os.environ.get(_LAZY_INIT)  # restored below: the program may have set it
    os.environ[_LAZY_INIT] = "1"
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[_LAZY_INIT]
        else:
            os.environ[_LAZY_INIT] = previous_value


def leave() -> None:
    """Leave the process group, if this process is in one."""
    end_world()
    children.unmark_as_rank()


def finish_on_gpu() -> None:
    """Wait until this rank's GPU, if it has one, has done all its work.

    Raises RuntimeError if a message was broken off, so that tensors have undefined values.
    """
    overdue = world().overdue
    if overdue is not None:
        overdue.finish()


def why_broken() -> str | None:
    """Return why nothing can be sent any more, or None while all is well.

    Once a rank is gone or has given up, it is the error message that every call raises.
    """
    state = existing_world()
    return None if state is None or state.watch is None else state.watch.alarm.words


def stop(words: str) -> None:
    """Make every communication call of this rank raise an error with text ``words``.

    A call that waits for other ranks raises at once. This lasts until the rank leaves the process
    group. Any thread may call it.
    """
    state = existing_world()
    if state is not None and state.watch is not None:
        state.watch.stop(words)
        if state.overdue is not None:
            state.overdue.break_off()
