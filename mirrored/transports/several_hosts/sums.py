"""Reductions between ranks on several hosts; ``routes.py`` selects the ranks that sum.

An addend is one rank's values for a part of the result. Addends are summed in the order of ranks.

```
          host 0: ranks 0, 1                       host 1: ranks 2, 3
started   addends that are added up here go        addends that are added up here go through
          through memory to the rank that adds     memory; those that host 0 adds up are sent
          them; sums of the first host are sent
wait      what came is added                       what came is added
```

"Memory" is the shared memory of a host. Everything that goes through it does so when the reduction
starts, so that ``wait()`` does not depend on another rank of this host.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import Later, Transport, Waitable
from ...reduction import accumulated_in, ordered_reduce
from ..torch_dist.described import call_under_way, resumed
from ..torch_dist.messages import Posted
from .hosts import Hosts
from .moves import HostsGather
from .routes import SumStep, route

# An all-reduce takes one round of messages, in which each host sends the addends of all its ranks
# in place of their sum, if these are at most this many bytes more. To send them takes less time
# than a second round, even on a link of 1 Gbit/s.
SMALL = 32 * 1024
# A longer one is sent in pieces: while one piece goes on to the next host, or back, another comes.
PIECE = 1 << 20


class _Adding(NamedTuple):
    """One step of a sum (``SumStep``) that this rank carries out, with its tensors.

    Attributes:
        before: buffer for the sum that the step before sends; None in a first step.
        coming: the started messages to wait for before adding; None if there are none.
        addends: the tensors to add, in order.
        to: the rank to send the sum to; None if it is this rank's part.
        name: the name of the message with the sum.
        is_last: whether this is the last step, whose sum is rounded to the dtype of the parts.
    """

    before: Tensor | None
    coming: Posted | None
    addends: list[Tensor]
    to: int | None
    name: str
    is_last: bool


# (position of the rank that gets the part, number of the step, the step, addends by position)
_Found = tuple[int, int, SumStep, dict[int, Tensor]]


class Reducing:
    """Started reduce-scatter between ranks on several hosts; ``wait()`` returns this rank's part.

    Args:
        name: the name of the call, for messages and errors.
        parts: contiguous tensors of one dim; rank k gets the reduced part k.
        hosts: the hosts of the ranks.
        inside: the transport between ranks of this host.
        op: the reduction: "sum", "max" or "min".
        at_once: use only routes on which no rank waits for one message before it sends another.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Tensor],
        hosts: Hosts,
        inside: Transport,
        *,
        op: str,
        at_once: bool,
    ) -> None:
        self._name, self._parts, self._hosts, self._inside = name, parts, hosts, inside
        self._op, self._call = op, call_under_way()
        self._wide = accumulated_in(parts[0].dtype)
        wider = self._wide.itemsize // parts[0].dtype.itemsize
        self._routes = {
            target: route(hosts.of, target, wider, at_once)
            for target, part in enumerate(parts)
            if part.numel()
        }
        self._total, self._under_way = parts[hosts.me], list[Posted]()
        self._to_do = self._prepared()
        # Sums that need no message start now; the rest, in `advance`, waits for messages.
        first = [adding for adding in self._to_do if adding.coming is None]
        self._to_do = [adding for adding in self._to_do if adding.coming is not None]
        for adding in first:
            self._add(adding)

    def advance(self) -> None:
        """Wait for the messages that this rank's remaining sums need; add them and send the sums.

        Does nothing when called again.
        """
        to_do, self._to_do = self._to_do, []
        with resumed(self._call):
            for adding in to_do:
                self._add(adding)

    def wait(self) -> Tensor:
        """Return this rank's part of the sum; its memory may be that of the part passed in."""
        self.advance()
        for posted in self._under_way:
            posted.wait()
        self._under_way = []
        return self._total

    # ---- what goes where ------------------------------------------------------------------------

    def _stages(self) -> Iterator[tuple[int, int, SumStep]]:
        """Yield the steps of all parts as (target, number, step); none waits for a later one.

        ``target`` is the position of the rank that gets the part. All steps of number 0 come first,
        then all of number 1, and so on.
        """
        for number in range(max(map(len, self._routes.values()), default=0)):
            for target, stages in self._routes.items():
                if number < len(stages):
                    yield target, number, stages[number]

    def _prepared(self) -> list[_Adding]:
        """Start to send and receive all addends; return the steps that this rank carries out.

        Addends from ranks of this host have arrived on return, those of other hosts have not.
        """
        me, ranks = self._hosts.me, self._hosts.ranks
        near: dict[int, list[Tensor]] = defaultdict(list)  # by the position that adds them up
        sends, receives, found = [], [], []
        for target, number, stage in self._stages():
            part = self._parts[target]
            if stage.worker == me:
                away = {k: torch.empty_like(part) for k in stage.adds if self._is_away(k)}
                receives += [(ranks[k], x) for k, x in away.items()]
                found.append((target, number, stage, {me: part, **away}))
            elif me in stage.adds and self._is_away(stage.worker):
                sends.append((ranks[stage.worker], part))
            elif me in stage.adds:
                near[stage.worker].append(part)
        posted = Posted(f"{self._name}, addends", self._parts[me], sends, receives, ranks)
        self._under_way.append(posted)
        self._swap_near(near, found)
        self._expect_total()
        return [self._adding(*each) for each in found]

    def _is_away(self, position: int) -> bool:
        return self._hosts.of[position] != self._hosts.host

    def _swap_near(self, near: dict[int, list[Tensor]], found: list[_Found]) -> None:
        """Exchange addends with the ranks of this host, through shared memory.

        Args:
            near: this rank's addends, by the position of the rank of this host that sums them.
            found: the steps that this rank carries out. The addends of ranks of this host are
                entered in their dicts.
        """
        hosts = self._hosts
        if len(hosts.mine) == 1:
            return
        due: dict[int, list[tuple[int, dict[int, Tensor]]]] = {k: [] for k in hosts.mine}
        for target, _, stage, addends in found:
            for k in stage.adds:
                if k not in addends:
                    due[k].append((self._parts[target].numel(), addends))
        nothing = self._parts[0][:0]
        pieces = [_joined(near[k], nothing) for k in hosts.mine]
        shapes = [(sum(size for size, _ in due[k]),) for k in hosts.mine]
        arrived = self._inside.all_to_all(pieces, shapes, hosts.peers)
        for k, piece in zip(hosts.mine, arrived, strict=True):
            parts = piece.split([size for size, _ in due[k]])
            for (_, addends), part in zip(due[k], parts):
                addends[k] = part

    def _adding(
        self, target: int, number: int, stage: SumStep, addends: dict[int, Tensor]
    ) -> _Adding:
        """Return step ``number`` of the sum for ``target`` with its tensors, as ``_Adding``.

        Starts to receive the sum that the step before it sends.
        """
        hosts, stages = self._hosts, self._routes[target]
        before, coming = None, None
        if number:
            before = torch.empty_like(self._parts[target], dtype=self._wide)
            source = hosts.ranks[stages[number - 1].worker]
            name = self._message(target, number - 1)
            coming = Posted(name, before, [], [(source, before)], hosts.ranks)
        elif any(map(self._is_away, stage.adds)):
            coming = self._under_way[0]
        is_last = number == len(stages) - 1
        to = target if is_last else stages[number + 1].worker
        name = self._message(target, number)
        to = None if to == hosts.me else hosts.ranks[to]
        return _Adding(before, coming, [addends[k] for k in stage.adds], to, name, is_last)

    def _expect_total(self) -> None:
        """Start to receive this rank's part, if another rank carries out its last step."""
        hosts = self._hosts
        stages = self._routes.get(hosts.me, ())
        if not stages or stages[-1].worker == hosts.me:
            return
        self._total = torch.empty_like(self._parts[hosts.me])
        name, source = self._message(hosts.me, len(stages) - 1), hosts.ranks[stages[-1].worker]
        self._under_way.append(Posted(name, self._total, [], [(source, self._total)], hosts.ranks))

    def _message(self, target: int, number: int) -> str:
        return f"{self._name}, sum {number} of part {target}"

    def _add(self, adding: _Adding) -> None:
        """Wait for the tensors of a step and add them; send the sum, or keep this rank's part."""
        if adding.coming is not None:
            self._under_way[0].wait()  # addends of other hosts
            adding.coming.wait()
        pieces = [x.to(self._wide) for x in adding.addends]
        if adding.before is not None:
            pieces.insert(0, adding.before)
        total = ordered_reduce(pieces, self._op)
        # Sums go from step to step in the wider dtype, and are rounded once, at the end.
        if adding.is_last:
            total = total.to(self._parts[0].dtype)
        if adding.to is None:
            self._total = total
            return
        ranks = self._hosts.ranks
        self._under_way.append(Posted(adding.name, total, [(adding.to, total)], [], ranks))


def _joined(xs: Sequence[Tensor], nothing: Tensor) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat([nothing, *xs])


class AllReducing:
    """Started all-reduce of a contiguous ``x`` by ``op``; ``wait()`` returns the result.

    Each rank on the host of the last rank gets the sum of one part of ``x``, and the sums are
    gathered from there. Between two hosts each byte is sent there and back once, which is the
    minimum. ``name``, ``hosts`` and ``inside`` are those of ``Reducing``.
    """

    def __init__(self, name: str, x: Tensor, hosts: Hosts, inside: Transport, op: str) -> None:
        self._name, self._hosts, self._inside = name, hosts, inside
        self._out, self._call = torch.empty_like(x), call_under_way()
        count = -(-x.nbytes // PIECE)
        self._pieces = self._out.view(-1).tensor_split(count)
        self._sums = [
            Reducing(name, self._cut(piece), hosts, inside, op=op, at_once=False)
            for piece in x.view(-1).tensor_split(count)
        ]
        self._gathers: list[HostsGather] = []

    def _cut(self, piece: Tensor) -> list[Tensor]:
        """Cut ``piece`` into a part for each rank to sum.

        Only ranks on the host of the last rank get numbers. The parts of other ranks are empty.
        """
        last = self._hosts.members[self._hosts.of[-1]]
        parts = dict(zip(last, piece.tensor_split(len(last)), strict=True))
        return [parts.get(k, piece[:0]) for k in range(len(self._hosts.ranks))]

    def advance(self) -> None:
        """Wait until this rank's parts are summed, and start to gather the sums on all ranks."""
        sums, self._sums = self._sums, []
        for piece, reducing in zip(self._pieces, sums):
            parts = self._cut(piece)
            parts[self._hosts.me].copy_(reducing.wait())
            with resumed(self._call):
                self._gathers.append(
                    HostsGather(self._name, parts[self._hosts.me], parts, self._hosts, self._inside)
                )

    def wait(self) -> Tensor:
        self.advance()
        for gathering in self._gathers:
            gathering.wait()
        return self._out


class AllReduces:
    """Starts all-reduces so that successive ones overlap.

    An all-reduce sums parts and then gathers the sums. Starting one also starts the gather of the
    one before, if that is not waited for yet, so its messages travel while the new one sums.
    """

    def __init__(self) -> None:
        self._last: Callable[[], AllReducing | None] = lambda: None  # weak

    def start(self, name: str, x: Tensor, hosts: Hosts, inside: Transport, op: str) -> Waitable:
        """Start an all-reduce of a contiguous ``x``; ``wait()`` returns the result.

        If ``x`` is short, the ranks gather all addends instead, which takes one round of messages.
        """
        if x.nbytes * (hosts.most - 1) <= SMALL:
            pieces = [x if k == hosts.me else torch.empty_like(x) for k in range(len(hosts.ranks))]
            return Later(
                HostsGather(name, x, pieces, hosts, inside), lambda: ordered_reduce(pieces, op)
            )
        started = AllReducing(name, x, hosts, inside, op)
        before, self._last = self._last(), weakref.ref(started)
        if before is not None:
            before.advance()
        return started
