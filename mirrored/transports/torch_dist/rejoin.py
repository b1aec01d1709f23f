"""One process in one world after another: it leaves a process group that lost a rank, and enters
the next one, without a restart.

```
enter(store, 2, 4, 30.0, True)    a process group of four, over a part of the store that is its own
broken()                    why nothing can be sent any more; None while all is well
leave()                     the process is in no group
enter(store, 1, 3, 30.0, False)   the next one
```

Gloo connects its ranks only when one of its own collectives is called, which the library does not:
a rank that dies while others enter leaves none of them waiting.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import children
from .groups import end_world, forget_names, watch_now, world

_LAZY = "TORCH_GLOO_LAZY_INIT"


def enter(store: Any, rank: int, size: int, timeout_s: float, is_first: bool) -> None:
    """Join the process group of ``size`` ranks that find each other in ``store``. No rank waits for
    another. If it is not the first one of the program, which stands still meanwhile, the ranks do
    not measure which way messages go faster (``tuning/``)."""
    forget_names()
    lazy = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    finally:
        if lazy is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = lazy
    children.mark(rank, size)
    world().measures = is_first


def leave() -> None:
    """Leave the process group, if this process is in one."""
    end_world()
    children.unmark()


def broken() -> str | None:
    """What every call that communicates raises from now on, because a rank is gone or has given up;
    None while all is well."""
    watch = watch_now()
    return None if watch is None else watch.alarm.words


def stop(words: str) -> None:
    """Make this rank raise ``words`` where it waits for others, and in every later call that
    communicates, until it leaves the process group. Any thread may call it."""
    watch = watch_now()
    if watch is not None:
        watch.stop(words)
