"""The transport in use: by default one over torch.distributed that shares memory where it can.

```
current()                       the transport of this thread
with use(transport): ...        another one, in this thread
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..comm import Transport
from .several_hosts import SeveralHosts
from .shared_memory import SharedMemory
from .symmetric_memory import SymmetricMemory


class _Thread(threading.local):
    override: Transport | None = None


_thread = _Thread()
_default: Transport | None = None


def current() -> Transport:
    """The transport of this thread: the one given by `use`, else that of torch.distributed."""
    return _thread.override or _default or _make_default()


def _make_default() -> Transport:
    global _default
    shared = SharedMemory(SeveralHosts())
    _default = SymmetricMemory(shared) if torch.cuda.is_available() else shared
    return _default


def put_around(wrap: Callable[[Transport], Transport]) -> Transport:
    """From now on the transport of this thread, and of all that had the same, is ``wrap`` of what
    it is now. Returns it."""
    global _default
    made = wrap(current())
    if _thread.override is not None:
        _thread.override = made
    else:
        _default = made
    return made


@contextmanager
def use(transport: Transport) -> Iterator[Transport]:
    """Make `transport` this thread's current one inside the `with` block."""
    before, _thread.override = _thread.override, transport
    try:
        yield transport
    finally:
        _thread.override = before


@contextmanager
def replace_current(transport: Transport) -> Iterator[Transport]:
    """Like `use`, but if no `use` is active in this thread it applies to all threads.

    Backward on CUDA runs in threads of the autograd engine, and they must see `transport` too.
    """
    global _default
    if _thread.override is not None:
        with use(transport):
            yield transport
        return
    before, _default = _default, transport
    try:
        yield transport
    finally:
        _default = before
