"""Communication in the background beside that of the program, in the order in which both came."""

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
    """Passes every call on to `inner`, after those that `submit` has sent to a thread.

    ```
    program   submit 0   work   call 1 (waits for 0)   submit 2   work   result of 2
    thread               call 0                                   call 2
    ```

    So ranks whose programs do the same make the same calls in the same order, and a program need
    not know what is under way. Calls in the thread run without autograd.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mirrored-ordered", initializer=self._begin)
        self._thread = 0
        # Weak, so that a result is not kept; the pool keeps a call that has not ended.
        self._last: Callable[[], Future | None] = _none

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        help_out()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call `function(*args)` in the thread, once the calls submitted before have returned."""
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
        if last is not None and threading.get_ident() != self._thread:
            self._last = _none
            last.exception()  # waits; whoever asks for the result is told
        return super().pass_on(name, *args, **kwargs)


def _none() -> None:
    return None


_all: weakref.WeakSet[Ordered] = weakref.WeakSet()


def _after_fork() -> None:
    """Runs in a forked child, which has none of its parent's threads and would wait for them."""
    for each in _all:
        each._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
