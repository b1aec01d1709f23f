"""Prefetch the sharded parameters that are needed next while the present ones are used.

They are gathered by messages that are sent during computation, or in a thread if ranks share memory
and have a spare core.

```
program              gather 0   submit 1   forward 0   result 1   submit 2   forward 1   result 2
thread or messages                         gather 1               gather 2
```

The module ``order`` predicts which parameters are needed next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mirrored.background import has_spare_cores
from mirrored.transports.default import current, wrap_current
from mirrored.transports.ordered import Ordered

from ...movement.coded import begin_gathers, gather_each, start_gathers
from ...movement.coders import Coder
from ...movement.several import Route
from ...movement.speeds import start_bytes
from ...movement.world import my_coordinate
from ...spec import Placement, TensorSpec

# A shard, its spec, the spec to gather it to, and its codecs if any.
Wanted = tuple[Tensor, TensorSpec, TensorSpec, Coder | None]


class _Switches:
    """Switches that ``prefetch_off`` sets; True switches prefetching off.

    Attributes:
        threads: for prefetching in a thread.
        messages: for prefetching by messages.
    """

    threads = messages = False


switches = _Switches()

# Prefetches are grouped until sending takes this many times as long as starting one communication.
_GROUP_FACTOR = 4


@contextmanager
def prefetch_off(messages: bool = True) -> Iterator[None]:
    """Switch off prefetching inside the context: in threads always, by messages if ``messages``.

    Recording a step uses it: a mode of this thread, such as a dispatch mode, would not see the ops
    of another thread.
    """
    previous = switches.threads, switches.messages
    switches.threads, switches.messages = True, messages
    try:
        yield
    finally:
        switches.threads, switches.messages = previous


@dataclass(frozen=True)
class Sending:
    """Way in which parameters are prefetched: by messages, or in a thread.

    Args:
        start: starts to gather parameters, and returns a function that waits for the results.
        group_bytes: the least bytes to prefetch at a time, if enough parameters follow. With a
            negative number nothing is prefetched; 0 stands for a thread.
    """

    start: Callable[[list[Wanted]], Callable[[], list[Tensor]]]
    group_bytes: int


def can_prefetch_on(placement: Placement) -> bool:
    """Return whether this rank is in ``placement`` and can prefetch parameters while it computes.

    The first call is a collective of the placement's ranks, whose result is kept.
    """
    return can_send_while_computing(placement) or _has_spare_core(placement)


def choose_prefetch(placement: Placement) -> Sending | None:
    """Return how a module on ``placement`` prefetches parameters; None if this rank cannot.

    By messages if they are sent while the rank computes, or else in a thread if there are spare
    cores. The first call is a collective of the placement's ranks.
    """
    if can_send_while_computing(placement):
        return by_messages()
    if not _has_spare_core(placement):
        return None
    transport = current()
    if not isinstance(transport, Ordered):
        transport = wrap_current(Ordered)
    assert isinstance(transport, Ordered)
    return Sending(partial(_start_in_thread, transport), 0)


def by_messages() -> Sending:
    """Return the ``Sending`` by which messages prefetch parameters while this rank computes."""
    return Sending(_by_messages, _GROUP_FACTOR * start_bytes("cpu"))


def no_prefetch() -> Sending:
    """Return a ``Sending`` with which nothing is prefetched, for a module that was unpickled."""
    return Sending(_by_messages, -1)


def can_send_while_computing(placement: Placement) -> bool:
    """Return whether this rank, in ``placement``, can compute while its messages are being sent.

    The first call is a collective of the placement's ranks.
    """
    return _is_inside(placement) and current().overlaps(_ranks(placement), placement.type)


def _has_spare_core(placement: Placement) -> bool:
    """Return whether this rank is in ``placement`` and has a spare core for a thread."""
    return _is_inside(placement) and has_spare_cores(_ranks(placement))


def _is_inside(placement: Placement) -> bool:
    return my_coordinate(placement) is not None and placement.type == "cpu"


def _ranks(placement: Placement) -> tuple[int, ...]:
    return tuple(placement.ranks.ravel().tolist())


def _by_messages(wanted: list[Wanted]) -> Callable[[], list[Tensor]]:
    """Start to gather parameters by messages; return a function that waits for the values."""
    xs, routes, coders = _unzip_wanted(wanted)
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        return start_gathers(xs, routes, coders).wait


def _start_in_thread(transport: Ordered, wanted: list[Wanted]) -> Callable[[], list[Tensor]]:
    """Start to gather parameters in a thread; return a function that waits for the values."""
    shards, routes, coders = _unzip_wanted(wanted)
    xs = begin_gathers(shards, routes, coders)
    return transport.submit(gather_each, xs, routes, coders, True).result


def _unzip_wanted(wanted: list[Wanted]) -> tuple[list[Tensor], list[Route], list[Coder | None]]:
    """Return the shards, the routes (spec, spec to gather to) and the codecs of parameters."""
    routes = [(src, dst) for _, src, dst, _ in wanted]
    return [x for x, *_ in wanted], routes, [coder for *_, coder in wanted]
