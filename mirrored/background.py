"""Communication in the background: a thread that calls one collective after another."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from .comm import Ranks, Transport
from .every_rank import gathered
from .transports.base.wrapper import Wrapper
from .transports.default import current, use
from .transports.faults.turns import help_out
from .transports.side_stream import callers_stream
from .transports.torch_dist import groups

T = TypeVar("T")


class BackgroundCalls:
    """Inside the `with` block, submitted calls run in a thread, in the order in which they came.

    ```
    caller    submit 0   work    submit 1   work    submit 2   work    result 0, 1, 2
    thread               call 0             call 1             call 2
    ```

    The caller must not communicate inside the block, because ranks match collectives by their
    order. After a call has raised no other begins, so that all ranks stop at the same one. The
    thread ends with the block. Calls run without autograd.
    """

    def __init__(self) -> None:
        self._transport = current()
        self._inference = torch.is_inference_mode_enabled()
        self._pool = ThreadPoolExecutor(1, "mirrored-background", initializer=help_out)
        self._failure: BaseException | None = None

    def __enter__(self) -> BackgroundCalls:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call `function(*args)` in the thread, once the calls submitted before have returned."""
        return self._pool.submit(self._call, callers_stream(), function, args)

    def _call(
        self, stream: AbstractContextManager[Any], function: Callable[..., T], args: tuple
    ) -> T:
        if self._failure is not None:
            raise self._failure
        inference = torch.inference_mode(self._inference)
        try:
            with use(self._transport), inference, torch.no_grad(), stream:
                return function(*args)
        except BaseException as error:
            self._failure = error
            raise


_answers: WeakKeyDictionary[Transport, dict[Ranks, bool]] = WeakKeyDictionary()


def has_spare_cores(ranks: Ranks) -> bool:
    """Whether each of `ranks` has a core for communication beside those that its own threads use.

    The first call is a collective of `ranks`, in which they exchange which cores each may use.
    Later calls return the same answer, which is the same on all of them.
    """
    transport = current()
    innermost = transport  # ranks may put another number of transports around it
    while isinstance(innermost, Wrapper):
        innermost = innermost.inner
    known = _answers.setdefault(innermost, {})
    if ranks not in known:
        own = socket.gethostname(), _cores(), torch.get_num_threads()
        known[ranks] = _are_enough(gathered(own, ranks))
    return known[ranks]


def _cores() -> frozenset[int]:
    """The cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


# A rank that enters another process group, where others know the answer from one before, asks.
groups.when_new.append(_answers.clear)


def _are_enough(uses: list[tuple[str, frozenset[int], int]]) -> bool:
    """Whether the cores are enough, for `uses`, the (host, cores, threads) of each rank."""
    if any(len(cores) <= threads for _, cores, threads in uses):
        return False
    for host in {name for name, _, _ in uses}:
        mine = [(cores, threads) for name, cores, threads in uses if name == host]
        shared = frozenset[int]().union(*(cores for cores, _ in mine))
        if len(shared) < sum(threads + 1 for _, threads in mine):
            return False
    return True
