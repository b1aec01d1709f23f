"""Prefetch the sharded parameters that are needed next while the present ones are used.

They are gathered by messages that are sent during computation, or in a thread if ranks share memory
and have a spare core.

```
program              gather 0   submit 1   forward 0   result 1   submit 2   forward 1   result 2
thread or messages                         gather 1               gather 2
```

The next parameters are predicted to be those that came next the last time, in forward and in
backward. After a wrong prediction, nothing is prefetched at that point again. Whether a parameter
is prefetched thus depends only on the program, not on the speed of a rank, so all ranks prefetch
the same.
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

from ...movement import check_mode
from ...movement.coded import begin_gathers, gather_each, start_each
from ...movement.coders import Coder
from ...movement.several import Route
from ...movement.speeds import start_bytes
from ...movement.world import my_coordinate
from ...spec import Placement, TensorSpec

Key = Any
# A shard, its spec, the spec to gather it to, and its codecs if any.
Wanted = tuple[Tensor, TensorSpec, TensorSpec, Coder | None]
# Whether prefetching is off in threads, and by messages.
_off = (False, False)

# Prefetches are grouped until sending takes this many times as long as starting one communication.
_WORTH = 4


@contextmanager
def switched_off(messages: bool = True) -> Iterator[None]:
    """Switch off prefetching inside the context: in threads always, by messages if ``messages``.

    Recorders use it: a mode of this thread, such as a dispatch mode, would not see the ops of
    another thread.
    """
    global _off
    before, _off = _off, (True, messages)
    try:
        yield
    finally:
        _off = before


class _Group:
    """Parameters that are prefetched together; ``take(i)`` waits, and returns the i-th one once."""

    def __init__(self, wait: Callable[[], list[Any]]) -> None:
        self._wait = wait
        self._made: list[Any] | None = None

    def take(self, i: int) -> Tensor:
        if self._made is None:
            self._made = list(self._wait())
        made, self._made[i] = self._made[i], None  # the caller gets the only reference
        return made


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


class _Coming(NamedTuple):
    """Prefetch under way of the parameters of ``key``, which was predicted to follow ``after``.

    Its results are the entries of ``group`` from ``first`` on.
    """

    after: Key
    key: Key
    parts: list[tuple[Tensor, int, TensorSpec]]  # shard, its version, the spec to gather it to
    group: _Group
    first: int


class Ahead:
    """Order in which a module's parameters are gathered, by which the next ones are predicted.

    There is one for forward, one for backward, and one for a forward that backward runs again.
    """

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self._follows: dict[Key, Key | None] = {}  # the next key; None after a wrong prediction
        self._before: Key | None = None
        self._coming: deque[_Coming] = deque()
        self._task = -1  # autograd's id of the running backward, -1 outside of one

    def restart(self) -> None:
        """Forget prefetches and the position in the order: a forward or backward begins."""
        self._before = None
        self._coming.clear()

    def drop(self) -> None:
        """Wait for prefetches that are under way, and drop their results."""
        for coming in self._coming:
            with suppress(Exception):  # the next communication raises the error
                coming.group.take(coming.first)
        self.restart()

    def arrived(self, key: Key) -> _Coming | None:
        """Record that ``key`` is gathered now, and return its prefetch if there is one."""
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
        """Start to prefetch the parameters that came after ``key`` the last time.

        Nothing is started while too many groups are under way: more than one by messages, or any in
        a thread.

        Args:
            key: identifies the parameters that are gathered now.
            wanted_for: (key) -> the shards, specs and codecs of its parameters.
        """
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
    """Return the prefetched values of the shard ``local``, gathered to ``dst``.

    Returns None if ``coming`` does not have them, or if the shard was written to since.
    """
    if coming is None:
        return None
    for i, (shard, writes, wanted) in enumerate(coming.parts):
        same = torch._C._is_alias_of(shard, local)  # type: ignore[attr-defined]
        if same and wanted is dst and writes == local._version:
            return coming.group.take(coming.first + i)
    return None


class Orders:
    """The three gather orders of one module: forward, backward, and forward again in backward."""

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self.forward, self.again, self.backward = (Ahead(sending) for _ in range(3))

    def in_forward(self) -> Ahead:
        """Return the order of the forward that runs now, which may be inside a backward."""
        return self.forward if torch._C._current_graph_task_id() == -1 else self.again

    def begin_forward(self, module: Any, args: Any) -> None:
        """Start the forward order over (forward pre-hook of the whole module)."""
        self.in_forward().restart()

    def drop(self) -> None:
        """Wait for prefetches that are under way in all orders, and drop their results."""
        for order in (self.forward, self.again, self.backward):
            order.drop()

    def __deepcopy__(self, memo: dict) -> Orders:
        return self

    def __reduce__(self) -> Any:
        # Loading must not run the collective that asks for spare cores: no prefetch in a thread.
        by_messages = self._sending.group_bytes > 0
        return Orders, (self._sending if by_messages else Sending(_by_messages, -1),)


def is_possible_on(placement: Placement) -> bool:
    """Return whether this rank is in ``placement`` and can prefetch parameters while it computes.

    The first call is a collective of the placement's ranks.
    """
    return travel(placement) or _have_cores(placement)


def orders_on(placement: Placement) -> Orders | None:
    """Return new gather orders for a module on ``placement``; None if it cannot prefetch.

    The first call is a collective of the placement's ranks.
    """
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
    """Return the way to prefetch by messages, which are sent while this rank computes."""
    return Sending(_by_messages, _WORTH * start_bytes("cpu"))


def travel(placement: Placement) -> bool:
    """Return whether this rank, in ``placement``, can compute while its messages are being sent.

    The first call is a collective of the placement's ranks.
    """
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
    """Leave inference mode inside the context, since tensors made there have no version counter."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _in_a_thread(transport: Ordered, wanted: list[Wanted]) -> Callable[[], list[Tensor]]:
    shards, routes, coders = _taken_apart(wanted)
    xs = begin_gathers(shards, routes, coders)
    return transport.submit(gather_each, xs, routes, coders, True).result


def _taken_apart(wanted: list[Wanted]) -> tuple[list[Tensor], list[Route], list[Coder | None]]:
    routes = [(src, dst) for _, src, dst, _ in wanted]
    return [x for x, *_ in wanted], routes, [coder for *_, coder in wanted]
