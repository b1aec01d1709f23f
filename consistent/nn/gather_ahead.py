"""Gathering the next parameters while these are used, where ranks have a core to spare for it.

```
program   gather 0   submit 1   forward 0   result 1   submit 2   forward 1   result 2   ...
thread                          gather 1               gather 2
```

What comes next is what came next the last time, in forward as in backward; where that was once
wrong it is not tried again. So whether something is gathered ahead depends on the program alone,
and not on what is faster on some rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrored.background import has_spare_cores
from mirrored.transports.default import current, put_around
from mirrored.transports.ordered import Ordered

from ..movement import check_mode
from ..movement.run import begin
from ..movement.several import run_several
from ..movement.world import my_coordinate
from ..spec import Placement, TensorSpec

Key = Any
_off = False


@contextmanager
def switched_off() -> Iterator[None]:
    """Inside, nothing is gathered in the background: who notes what is sent would not see it."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


class _Coming(NamedTuple):
    """What is on its way: for ``key``, sent when ``after`` had come, once for each tensor."""

    after: Key
    key: Key
    parts: list[tuple[Tensor, int, TensorSpec]]  # shard, its writes, wanted
    wholes: Future[list[Tensor]]


class Ahead:
    """The order in which one module's parameters are gathered: in forward, in backward, or by
    forward that is run again in backward."""

    def __init__(self, transport: Ordered) -> None:
        self._transport = transport
        self._follows: dict[Key, Key | None] = {}
        self._before: Key | None = None
        self._coming: _Coming | None = None
        self._task = -1  # the backward that goes on

    def restart(self) -> None:
        """A forward or backward begins: nothing came before."""
        self._before = self._coming = None

    def drop(self) -> None:
        """Wait for what is on its way, and forget it."""
        if self._coming is not None:
            self._coming.wholes.exception()
        self.restart()

    def arrived(self, key: Key) -> _Coming | None:
        """What was gathered ahead for ``key``, which is next."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.restart()
        coming, self._coming = self._coming, None
        if coming is not None and coming.key != key:
            self._follows[coming.after] = None
            coming = None
        if self._before is not None:
            self._follows.setdefault(self._before, key)
        self._before = key
        return coming

    def expected(self, key: Key) -> Key | None:
        """What came after ``key``."""
        return None if check_mode.enabled or _off else self._follows.get(key)

    def submit(self, after: Key, key: Key, wanted: list[tuple]) -> None:
        """Gather each (shard, spec, wanted spec) in the background, for ``key``."""
        xs = [begin(*each)[0] for each in wanted]
        routes = [(src, dst) for _, src, dst in wanted]
        wholes = self._transport.submit(run_several, xs, routes, None, True)
        parts = [(local, local._version, dst) for local, _, dst in wanted]
        self._coming = _Coming(after, key, parts, wholes)


def find(coming: _Coming | None, local: Tensor, dst: TensorSpec) -> Tensor | None:
    """The gathered values of ``local``, if they are there and it was not written to since."""
    if coming is None:
        return None
    for i, (shard, writes, wanted) in enumerate(coming.parts):
        same = torch._C._is_alias_of(shard, local)  # type: ignore[attr-defined]
        if same and wanted is dst and writes == local._version:
            return coming.wholes.result()[i]
    return None


class Orders:
    """The three orders of one module."""

    def __init__(self, transport: Ordered) -> None:
        self.forward, self.again, self.backward = (Ahead(transport) for _ in range(3))

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
        return (type(None), ())


def is_possible_on(placement: Placement) -> bool:
    """Whether this rank is one of ``placement`` and all of them have a core to spare. A collective
    of these ranks, the first time."""
    if my_coordinate(placement) is None or placement.type != "cpu":
        return False
    return has_spare_cores(tuple(placement.ranks.ravel().tolist()))


def orders_on(placement: Placement) -> Orders | None:
    """None if nothing is gathered ahead on ``placement``. A collective of its ranks, the first
    time."""
    if not is_possible_on(placement):
        return None
    transport = current()
    if not isinstance(transport, Ordered):
        transport = put_around(Ordered)
    assert isinstance(transport, Ordered)
    return Orders(transport)
