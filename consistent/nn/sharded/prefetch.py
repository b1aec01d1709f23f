"""Gathering the next parameters while these are used: by messages, which travel meanwhile, or in a
thread, where ranks share memory and have a core to spare for it.

```
program              gather 0   submit 1   forward 0   result 1   submit 2   forward 1   result 2
thread or messages                         gather 1               gather 2
```

What comes next is what came next the last time, in forward as in backward; where that was once
wrong it is not tried again. So whether something is gathered ahead depends on the program alone,
and not on what is faster on some rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrored.background import has_spare_cores
from mirrored.transports.default import current, put_around
from mirrored.transports.ordered import Ordered

from ...boxing.cost import start_bytes
from ...movement import check_mode
from ...movement.coded import begin_gathers, gather_each, start_each
from ...movement.coders import Coder
from ...movement.several import Route
from ...movement.world import my_coordinate
from ...spec import Placement, TensorSpec

Key = Any
# A shard, its spec, the wanted spec, and by what it is sent in fewer bytes, if it is.
Wanted = tuple[Tensor, TensorSpec, TensorSpec, Coder | None]
# Whether nothing is gathered ahead in threads, and by messages.
_off = (False, False)

# Parameters are sent for at least for so many times as long at a time as one more communication
# keeps a rank busy, where as many follow.
_WORTH = 4


@contextmanager
def switched_off(messages: bool = True) -> Iterator[None]:
    """Inside, nothing is gathered in threads, where a mode of this thread would not see it, nor, if
    ``messages``, by messages that are waited for later."""
    global _off
    before, _off = _off, (True, messages)
    try:
        yield
    finally:
        _off = before


class _Group:
    """What was sent for at once. ``take`` waits for it, and gives each part once."""

    def __init__(self, wait: Callable[[], list[Any]]) -> None:
        self._wait = wait
        self._made: list[Any] | None = None

    def take(self, i: int) -> Tensor:
        if self._made is None:
            self._made = list(self._wait())
        made, self._made[i] = self._made[i], None
        return made


@dataclass(frozen=True)
class Sending:
    """How parameters are sent for: ``start`` starts gathering all it is given, and gives what waits
    for the results; at least ``group_bytes`` are sent for at a time, where as many follow. Nothing
    is where ``group_bytes`` is negative."""

    start: Callable[[list[Wanted]], Callable[[], list[Tensor]]]
    group_bytes: int


class _Coming(NamedTuple):
    """What is on its way: for ``key``, which follows ``after``; parts of ``group`` from ``first``
    on."""

    after: Key
    key: Key
    parts: list[tuple[Tensor, int, TensorSpec]]  # shard, its writes, wanted
    group: _Group
    first: int


class Ahead:
    """The order in which one module's parameters are gathered: in forward, in backward, or by
    forward that is run again in backward."""

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self._follows: dict[Key, Key | None] = {}
        self._before: Key | None = None
        self._coming: deque[_Coming] = deque()
        self._task = -1  # the backward that goes on

    def restart(self) -> None:
        """A forward or backward begins: nothing came before."""
        self._before = None
        self._coming.clear()

    def drop(self) -> None:
        """Wait for what is on its way, and forget it."""
        for coming in self._coming:
            with suppress(Exception):  # whoever communicates next is told
                coming.group.take(coming.first)
        self.restart()

    def arrived(self, key: Key) -> _Coming | None:
        """What was gathered ahead for ``key``, which is next."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.restart()
        coming = self._coming.popleft() if self._coming else None
        if coming is not None and coming.key != key:
            self._follows[coming.after] = None
            self._coming.clear()
            coming = None
        if self._before is not None:
            self._follows.setdefault(self._before, key)
        self._before = key
        return coming

    def go_on(self, key: Key, wanted_for: Callable[[Key], list[Wanted]]) -> None:
        """Send for what came after ``key`` the last time, while one group at most is on its way."""
        if check_mode.enabled or _off[self._sending.group_bytes > 0]:
            return
        groups = {id(coming.group) for coming in self._coming}
        if len(groups) > (1 if self._sending.group_bytes else 0):
            return
        after, keys, wanted = self._coming[-1].key if self._coming else key, [], []
        known = {key, *(coming.key for coming in self._coming)}
        nbytes = 0
        while nbytes <= self._sending.group_bytes:
            following = self._follows.get(after)
            if following is None or (following in known and keys):
                break
            keys.append((after, following, wanted_for(following)))
            wanted += keys[-1][2]
            nbytes += 1 + sum(dst.largest_nbytes for _, _, dst, _ in keys[-1][2])
            known.add(following)
            after = following
        if not wanted:
            return
        group, first = _Group(self._sending.start(wanted)), 0
        for before, following, own in keys:
            parts = [(local, local._version, dst) for local, _, dst, _ in own]
            self._coming.append(_Coming(before, following, parts, group, first))
            first += len(own)


def find(coming: _Coming | None, local: Tensor, dst: TensorSpec) -> Tensor | None:
    """The gathered values of ``local``, if they are there and it was not written to since."""
    if coming is None:
        return None
    for i, (shard, writes, wanted) in enumerate(coming.parts):
        same = torch._C._is_alias_of(shard, local)  # type: ignore[attr-defined]
        if same and wanted is dst and writes == local._version:
            return coming.group.take(coming.first + i)
    return None


class Orders:
    """The three orders of one module."""

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self.forward, self.again, self.backward = (Ahead(sending) for _ in range(3))

    def in_forward(self) -> Ahead:
        """The order that a forward is in which runs now."""
        return self.forward if torch._C._current_graph_task_id() == -1 else self.again

    def begin_forward(self, module: Any, args: Any) -> None:
        """A hook of the whole module."""
        self.in_forward().restart()

    def drop(self) -> None:
        """Wait for what is on its way, and forget it."""
        for order in (self.forward, self.again, self.backward):
            order.drop()

    def __deepcopy__(self, memo: dict) -> Orders:
        return self

    def __reduce__(self) -> Any:  # a module that is loaded asks nobody for cores
        by_messages = self._sending.group_bytes > 0
        return Orders, (self._sending if by_messages else Sending(_by_messages, -1),)


def is_possible_on(placement: Placement) -> bool:
    """Whether this rank is one of ``placement``, and parameters can come while it computes. The
    first call is a collective of its ranks."""
    return travel(placement) or _have_cores(placement)


def orders_on(placement: Placement) -> Orders | None:
    """The orders of gathers on ``placement``, or None if nothing is prefetched there. A collective
    of its ranks, the first time."""
    if travel(placement):
        return Orders(by_messages())
    if not _have_cores(placement):
        return None
    transport = current()
    if not isinstance(transport, Ordered):
        transport = put_around(Ordered)
    assert isinstance(transport, Ordered)
    return Orders(Sending(partial(_in_a_thread, transport), 0))


def by_messages() -> Sending:
    """How parameters are sent for where messages travel while this rank computes."""
    return Sending(_by_messages, _WORTH * start_bytes("cpu"))


def travel(placement: Placement) -> bool:
    """Whether this rank is one of ``placement``, and messages travel between them while it
    computes. The first call is a collective of its ranks."""
    return _is_inside(placement) and current().overlaps(_ranks(placement), placement.type)


def _have_cores(placement: Placement) -> bool:
    return _is_inside(placement) and has_spare_cores(_ranks(placement))


def _is_inside(placement: Placement) -> bool:
    return my_coordinate(placement) is not None and placement.type == "cpu"


def _ranks(placement: Placement) -> tuple[int, ...]:
    return tuple(placement.ranks.ravel().tolist())


def _by_messages(wanted: list[Wanted]) -> Callable[[], list[Tensor]]:
    xs, routes, coders = _taken_apart(wanted)
    with _outside_inference():
        started = start_each(xs, routes, coders)

    def wait() -> list[Tensor]:
        with _outside_inference():
            return started.wait()

    return wait


def _outside_inference() -> AbstractContextManager[Any]:
    """A tensor made in inference mode would count no writes."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _in_a_thread(transport: Ordered, wanted: list[Wanted]) -> Callable[[], list[Tensor]]:
    shards, routes, coders = _taken_apart(wanted)
    xs = begin_gathers(shards, routes, coders)
    return transport.submit(gather_each, xs, routes, coders, True).result


def _taken_apart(wanted: list[Wanted]) -> tuple[list[Tensor], list[Route], list[Coder | None]]:
    routes = [(src, dst) for _, src, dst, _ in wanted]
    return [x for x, *_ in wanted], routes, [coder for *_, coder in wanted]
