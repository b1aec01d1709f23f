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
from .faults.turns import help_out
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
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mirrored-ordered", initializer=self._begin)
        self._thread = 0
        # Weak, so that a result is not kept alive; the pool holds a call that has not ended.
        self._last: Callable[[], Future | None] = _none

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        help_out()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queue ``function(*args)`` behind all calls submitted before, and return its future."""
        made = self._pool.submit(self._call, callers_stream(), function, args)
        self._last = weakref.ref(made)
        return made

    def _call(
        self, stream: AbstractContextManager[Any], function: Callable[..., T], args: tuple
    ) -> T:
        with use(self.inner), torch.no_grad(), stream:
            return function(*args)

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        last = self._last()
        # Not in the thread itself, where a call would wait for itself.
        if last is not None and threading.get_ident() != self._thread:
            self._last = _none
            last.exception()  # waits; an error is raised where the result is asked for
        return super().pass_on(name, *args, **kwargs)


def _none() -> None:
    return None


_all: weakref.WeakSet[Ordered] = weakref.WeakSet()


def _after_fork() -> None:
    """Give all wrappers new thread pools in a forked child, which lacks its parent's threads."""
    for each in _all:
        each._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
