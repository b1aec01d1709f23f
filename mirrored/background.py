"""Background collectives: a thread runs submitted calls in order, while the caller computes."""

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
from .every_rank import gather_from_ranks
from .transports.base.wrapper import Wrapper
from .transports.default import current, use
from .transports.faults.turns import allow_this_thread
from .transports.side_stream import callers_stream
from .transports.torch_dist import groups

T = TypeVar("T")


class BackgroundCalls:
    """Context manager in which submitted calls run in one thread, in the order of submission.

    ```
    caller    submit 0   work    submit 1   work    submit 2   work    result 0, 1, 2
    thread               call 0             call 1             call 2
    ```

    The caller must not communicate inside the block, because ranks match collectives by their
    order. After a call has raised, later calls raise the same error without running, so that all
    ranks stop at the same call. The thread ends with the block. Calls run without autograd.
    """

    def __init__(self) -> None:
        self._transport = current()
        self._inference = torch.is_inference_mode_enabled()
        self._pool = ThreadPoolExecutor(1, "mirrored-background", initializer=allow_this_thread)
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
        """Queue ``function(*args)`` behind all calls submitted before, and return its future."""
        return self._pool.submit(self._run_call, callers_stream(), function, args)

    def _run_call(
        self, stream: AbstractContextManager[Any], function: Callable[..., T], args: tuple
    ) -> T:
        if self._failure is not None:
            raise self._failure
        # Grad mode, inference mode and the transport are per thread: restore the creator's here.
        inference = torch.inference_mode(self._inference)
        try:
            with use(self._transport), inference, torch.no_grad(), stream:
                return function(*args)
        except BaseException as error:
            self._failure = error
            raise


_spare_cores_cache: WeakKeyDictionary[Transport, dict[Ranks, bool]] = WeakKeyDictionary()


def has_spare_cores(ranks: Ranks) -> bool:
    """Return whether each of ``ranks`` has a free core for a communication thread.

    That is so if the cores of each host suffice for all torch threads of its ranks and one more
    thread for each rank. The first call is a collective over ``ranks``, in which they exchange
    which cores each may use. Later calls return the cached answer, which is the same on all of
    them.
    """
    transport = current()
    innermost = transport  # the cache's key, since ranks may differ in their wrappers
    while isinstance(innermost, Wrapper):
        innermost = innermost.inner
    answers = _spare_cores_cache.setdefault(innermost, {})
    if ranks not in answers:
        own_use = socket.gethostname(), _allowed_cores(), torch.get_num_threads()
        answers[ranks] = _have_spare_cores(gather_from_ranks(own_use, ranks))
    return answers[ranks]


def _allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores on which this process may run: its CPU affinity."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


# The first call is a collective, so either all ranks of a group have an answer cached or none has:
# a process that joins later has none, so every rank drops its answers when it enters a new group.
groups.new_group_callbacks.append(_spare_cores_cache.clear)


def _have_spare_cores(uses: list[tuple[str, frozenset[int], int]]) -> bool:
    """Return whether every rank has one core more than its torch threads need.

    On each host there must be a core for each torch thread of its ranks, and one more for each
    rank: two ranks of 3 threads on one host need 8 cores.

    Args:
        uses: the (host, cores that it may use, number of torch threads) of each rank.
    """
    if any(len(cores) <= threads for _, cores, threads in uses):
        return False
    for host in {name for name, _, _ in uses}:
        uses_of_host = [(cores, threads) for name, cores, threads in uses if name == host]
        cores_of_host = frozenset[int]().union(*(cores for cores, _ in uses_of_host))
        if len(cores_of_host) < sum(threads + 1 for _, threads in uses_of_host):
            return False
    return True
