"""Runs collectives in a background thread, in one order with those of the program.

Ranks match collectives by their order, so a prefetch in a thread must not run before a collective
of the program on one rank and after it on another.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from ..comm import Transport
from .base.wrapper import Wrapper
from .default import use
from .faults.turns import allow_this_thread
from .side_stream import callers_stream

T = TypeVar("T")


class Ordered(Wrapper):
    """Wrapper that runs submitted calls in a thread; other calls wait for those submitted before.

    ```
    program   submit 0   work   call 1 (waits for 0)   submit 2   work   result of 2
    thread               call 0                                   call 2
    ```

    So ranks that run the same program make the same calls in the same order, and the program need
    not know what is under way. Calls in the thread run without autograd.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._start_pool()
        _instances.add(self)

    def _start_pool(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mirrored-ordered", initializer=self._init_thread)
        self._thread_ident = 0
        # Weak, so that a result is not kept alive; the pool holds a call that has not ended.
        self._last_future: Callable[[], Future | None] = _no_future

    def _init_thread(self) -> None:
        self._thread_ident = threading.get_ident()
        allow_this_thread()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queue ``function(*args)`` behind all calls submitted before, and return its future."""
        future = self._pool.submit(self._run_call, callers_stream(), function, args)
        self._last_future = weakref.ref(future)
        return future

    def _run_call(
        self, stream: AbstractContextManager[Any], function: Callable[..., T], args: tuple
    ) -> T:
        with use(self.inner), torch.no_grad(), stream:
            return function(*args)

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        last_call = self._last_future()
        # Not in the thread itself, where a call would wait for itself.
        if last_call is not None and threading.get_ident() != self._thread_ident:
            self._last_future = _no_future
            last_call.exception()  # waits; an error is raised where the result is asked for
        return super().pass_on(name, *args, **kwargs)


def _no_future() -> None:
    return None


_instances: weakref.WeakSet[Ordered] = weakref.WeakSet()


def _restart_pools() -> None:
    """Give all wrappers new thread pools in a forked child, which lacks its parent's threads."""
    for wrapper in _instances:
        wrapper._start_pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_pools)
