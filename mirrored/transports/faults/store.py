"""Access with a time limit to the store of torch.distributed, by which ranks find each other.

TCPStore itself blocks for as long as the kernel keeps a connection to an unreachable host, a
quarter of an hour, and lets no other thread call it meanwhile. So each call is made in a thread,
and at most one is under way: if a thread hangs in the store, no further one is started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed.distributed_c10d as c10d

T = TypeVar("T")

_CHECK_INTERVAL_S = 0.05  # between two calls of `check`


class LimitedStore:
    """Store of torch.distributed whose calls fail if there is no answer in ``limit_s`` seconds.

    ``turn`` is the lock that ``with_prefix`` passes on, so that all views of one store make one
    call at a time; by default a new one.
    """

    def __init__(self, store: Any, limit_s: float, turn: _CallLock | None = None) -> None:
        self._store, self._limit_s = store, limit_s
        # Shared by all views of a store, since its connection carries one call at a time.
        self._call_lock = turn or _CallLock()

    def with_prefix(self, prefix: str) -> LimitedStore:
        """Return a store for the keys that begin with ``prefix``, as ``PrefixStore`` does."""
        return LimitedStore(c10d.PrefixStore(prefix, self._store), self._limit_s, self._call_lock)

    def ask(
        self,
        call: Callable[[Any], T],
        limit_s: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """Call ``call(store)`` in a thread, and return its result or raise its error.

        ``check`` is called regularly while this waits, and may raise.

        Raises:
            RuntimeError: "Timed out waiting", if there is no answer within ``limit_s`` seconds; by
                default within the store's own limit.
        """
        deadline = time.monotonic() + (self._limit_s if limit_s is None else limit_s)
        while True:
            check()
            remaining_s = deadline - time.monotonic()
            if self._call_lock.take(max(0.0, min(_CHECK_INTERVAL_S, remaining_s))):
                break
            if remaining_s <= 0:
                raise RuntimeError("Timed out waiting")
        store_call = _StoreCall(call, self._store, self._call_lock)
        while not store_call.done.wait(
            max(0.0, min(_CHECK_INTERVAL_S, deadline - time.monotonic()))
        ):
            check()
            if time.monotonic() > deadline:
                raise RuntimeError("Timed out waiting")
        if store_call.error is not None:
            raise store_call.error
        return store_call.result  # type: ignore[return-value]

    def begin(self, call: Callable[[Any], object]) -> bool:
        """Start ``call(store)`` without waiting for it, unless another call is under way.

        Returns whether it was started. An error that it raises is lost.
        """
        if not self._call_lock.take(0.0):
            return False
        _StoreCall(call, self._store, self._call_lock)
        return True


class _CallLock:
    """Lock that lets one call of the store be under way at a time.

    The caller takes it, and the thread that makes the call releases it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False

    def take(self, limit_s: float) -> bool:
        """Take the lock if it is free within ``limit_s`` seconds; return whether it was taken."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_taken, limit_s):
                return False
            self._is_taken = True
            return True

    def end(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify()


class _StoreCall:
    """A call of the store that runs in a thread of its own.

    At its end the thread sets ``done`` and ``result`` or ``error``, and releases the lock ``lock``.
    """

    def __init__(self, call: Callable[[Any], object], store: Any, lock: _CallLock) -> None:
        self.done = threading.Event()
        self.result: object = None
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.result = call(store)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                self.error = error
            finally:
                lock.end()
                self.done.set()

        try:
            # A daemon: it may hang in the store for a quarter of an hour.
            threading.Thread(target=run, daemon=True, name="mirrored-store").start()
        except BaseException:
            lock.end()
            raise
