"""The store by which ranks find each other, asked for a limited time.

TCPStore itself waits as long as the kernel keeps a connection to a host that is out of reach, a
quarter of an hour, and lets nobody else ask meanwhile. So each call is made in a thread, and at
most one is under way: a thread that hangs there stays the only one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed.distributed_c10d as c10d

T = TypeVar("T")

_SLICE_S = 0.05  # between two looks whether a rank has given up


class LimitedStore:
    """A store of torch.distributed whose answers are waited for in vain for `limit_s` seconds."""

    def __init__(self, store: Any, limit_s: float, turn: _Turn | None = None) -> None:
        self._store, self._limit_s = store, limit_s
        self._turn = turn or _Turn()

    def part(self, prefix: str) -> LimitedStore:
        """The part of it whose keys begin with a prefix."""
        return LimitedStore(c10d.PrefixStore(prefix, self._store), self._limit_s, self._turn)

    def ask(
        self,
        call: Callable[[Any], T],
        limit_s: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """What `call(store)` returns or raises. `check` is called now and then, and may raise.

        Raises:
            RuntimeError: "Timed out waiting", if there is no answer within `limit_s` seconds; by
                default within those of the store.
        """
        deadline = time.monotonic() + (self._limit_s if limit_s is None else limit_s)
        while True:
            check()
            left = deadline - time.monotonic()
            if self._turn.take(max(0.0, min(_SLICE_S, left))):
                break
            if left <= 0:
                raise RuntimeError("Timed out waiting")
        asked = _Asked(call, self._store, self._turn)
        while not asked.done.wait(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            check()
            if time.monotonic() > deadline:
                raise RuntimeError("Timed out waiting")
        if asked.error is not None:
            raise asked.error
        return asked.result  # type: ignore[return-value]

    def begin(self, call: Callable[[Any], object]) -> bool:
        """Make `call(store)` without waiting for it, unless another one is under way; whether it is
        made. What it raises is lost."""
        if not self._turn.take(0.0):
            return False
        _Asked(call, self._store, self._turn)
        return True


class _Turn:
    """The right to ask: one thread takes it, and the one that asks for it ends it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False

    def take(self, limit_s: float) -> bool:
        """Take it, if it is free within a time."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._taken, limit_s):
                return False
            self._taken = True
            return True

    def end(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify()


class _Asked:
    """A call that is made in a thread, which ends `turn`."""

    def __init__(self, call: Callable[[Any], object], store: Any, turn: _Turn) -> None:
        self.done = threading.Event()
        self.result: object = None
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.result = call(store)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                self.error = error
            finally:
                turn.end()
                self.done.set()

        try:
            threading.Thread(target=run, daemon=True, name="mirrored-store").start()
        except BaseException:
            turn.end()
            raise
