"""Selects the transport in use; the default is torch.distributed with shared memory where possible.

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


class _ThreadState(threading.local):
    override: Transport | None = None


_thread = _ThreadState()
_default: Transport | None = None


def current() -> Transport:
    """Return the transport of this thread: that of ``use``, else the process-wide default.

    The default is made at the first call.
    """
    return _thread.override or _default or _make_default()


def _make_default() -> Transport:
    global _default
    # From the innermost out: messages, shared CPU memory, shared GPU memory. Each transport passes
    # what it does not handle to the one that it wraps.
    shared = SharedMemory(SeveralHosts())
    _default = SymmetricMemory(shared) if torch.cuda.is_available() else shared
    return _default


def wrap_current(wrap: Callable[[Transport], Transport]) -> Transport:
    """Wrap the current transport by ``wrap(transport)``, make the result current, and return it.

    If no ``use`` is active in this thread, the process-wide default is replaced, for all threads
    that use it.
    """
    global _default
    wrapper = wrap(current())
    if _thread.override is not None:
        _thread.override = wrapper
    else:
        _default = wrapper
    return wrapper


@contextmanager
def use(transport: Transport) -> Iterator[Transport]:
    """Make ``transport`` this thread's current one inside the ``with`` block."""
    before, _thread.override = _thread.override, transport
    try:
        yield transport
    finally:
        _thread.override = before


@contextmanager
def replace_current(transport: Transport) -> Iterator[Transport]:
    """Make ``transport`` current inside the ``with`` block, in all threads if possible.

    Unlike ``use`` it replaces the process-wide default, because backward on CUDA runs in threads of
    the autograd engine, which must use ``transport`` too. Inside a ``use`` block only this thread
    is affected.
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
