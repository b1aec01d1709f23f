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

from ...comm import PendingResult, Transport, Waitable
from ...reduction import accumulation_dtype, ordered_reduce
from ..torch_dist.described import current_call, resume_call
from ..torch_dist.messages import StartedMessages
from .hosts import Hosts
from .moves import HostsGather
from .routes import SumStep, plan_sum

# An all-reduce takes one round of messages, in which each host sends the addends of all its ranks
# in place of their sum, if these are at most this many bytes more. To send them takes less time
# than a second round, even on a link of 1 Gbit/s.
ONE_ROUND_BYTES = 32 * 1024
# A longer one is sent in pieces: while one piece goes on to the next host, or back, another comes.
PIECE_BYTES = 1 << 20


class _PreparedStep(NamedTuple):
    """One step of a sum (``SumStep``) that this rank carries out, with its tensors.

    Attributes:
        previous_sum: buffer for the sum that the step before sends; None in a first step.
        incoming: the started messages to wait for before adding; None if there are none.
        addends: the tensors to add, in order.
        to: the rank to send the sum to; None if it is this rank's part.
        name: the name of the message with the sum.
        is_last: whether this is the last step, whose sum is rounded to the dtype of the parts.
    """

    previous_sum: Tensor | None
    incoming: StartedMessages | None
    addends: list[Tensor]
    to: int | None
    name: str
    is_last: bool


# (position of the rank that gets the part, number of the step, the step, addends by position)
_OwnStep = tuple[int, int, SumStep, dict[int, Tensor]]


class HostsReduceScatter:
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
        self._name, self._parts, self._hosts, self._inside_transport = name, parts, hosts, inside
        self._op, self._call = op, current_call()
        self._sum_dtype = accumulation_dtype(parts[0].dtype)
        widening = self._sum_dtype.itemsize // parts[0].dtype.itemsize
        self._routes = {
            target: plan_sum(hosts.host_of, target, widening, at_once)
            for target, part in enumerate(parts)
            if part.numel()
        }
        self._total, self._started_messages = parts[hosts.position], list[StartedMessages]()
        self._pending_steps = self._start_addends()
        # Sums that need no message start now; the rest, in `advance`, waits for messages.
        immediate_steps = [step for step in self._pending_steps if step.incoming is None]
        self._pending_steps = [step for step in self._pending_steps if step.incoming is not None]
        for step in immediate_steps:
            self._run_step(step)

    def advance(self) -> None:
        """Wait for the messages that this rank's remaining sums need; add them and send the sums.

        Does nothing when called again.
        """
        pending_steps, self._pending_steps = self._pending_steps, []
        with resume_call(self._call):
            for step in pending_steps:
                self._run_step(step)

    def wait(self) -> Tensor:
        """Wait for this rank's part of the sum; it may share the storage of the part passed in."""
        self.advance()
        for messages in self._started_messages:
            messages.wait()
        self._started_messages = []
        return self._total

    # ---- what goes where ------------------------------------------------------------------------

    def _numbered_steps(self) -> Iterator[tuple[int, int, SumStep]]:
        """Yield the steps of all parts as (target, number, step); none waits for a later one.

        ``target`` is the position of the rank that gets the part. All steps of number 0 come first,
        then all of number 1, and so on.
        """
        for number in range(max(map(len, self._routes.values()), default=0)):
            for target, stages in self._routes.items():
                if number < len(stages):
                    yield target, number, stages[number]

    def _start_addends(self) -> list[_PreparedStep]:
        """Start to send and receive all addends; return the steps that this rank carries out.

        Addends from ranks of this host have arrived on return, those of other hosts have not.
        """
        me, ranks = self._hosts.position, self._hosts.ranks
        local_addends: dict[int, list[Tensor]] = defaultdict(list)  # by the adding position
        sends, receives, own_steps = [], [], []
        for target, number, stage in self._numbered_steps():
            part = self._parts[target]
            if stage.worker == me:
                remote_addends = {
                    k: torch.empty_like(part) for k in stage.adds if self._is_on_other_host(k)
                }
                receives += [(ranks[k], x) for k, x in remote_addends.items()]
                own_steps.append((target, number, stage, {me: part, **remote_addends}))
            elif me in stage.adds and self._is_on_other_host(stage.worker):
                sends.append((ranks[stage.worker], part))
            elif me in stage.adds:
                local_addends[stage.worker].append(part)
        messages = StartedMessages(
            f"{self._name}, addends", self._parts[me], sends, receives, ranks
        )
        self._started_messages.append(messages)
        self._exchange_on_host(local_addends, own_steps)
        self._receive_total()
        return [self._prepare_step(*own_step) for own_step in own_steps]

    def _is_on_other_host(self, position: int) -> bool:
        return self._hosts.host_of[position] != self._hosts.host

    def _exchange_on_host(
        self, local_addends: dict[int, list[Tensor]], own_steps: list[_OwnStep]
    ) -> None:
        """Exchange addends with the ranks of this host, through shared memory.

        Args:
            local_addends: this rank's addends, by the position of the rank of this host that sums
                them.
            own_steps: the steps that this rank carries out. The addends of ranks of this host are
                entered in their dicts.
        """
        hosts = self._hosts
        if len(hosts.own_positions) == 1:
            return
        expected: dict[int, list[tuple[int, dict[int, Tensor]]]] = {
            k: [] for k in hosts.own_positions
        }
        for target, _, stage, addends in own_steps:
            for k in stage.adds:
                if k not in addends:
                    expected[k].append((self._parts[target].numel(), addends))
        empty = self._parts[0][:0]
        pieces = [_concat(local_addends[k], empty) for k in hosts.own_positions]
        shapes = [(sum(size for size, _ in expected[k]),) for k in hosts.own_positions]
        received = self._inside_transport.all_to_all(pieces, shapes, hosts.peers)
        for k, piece in zip(hosts.own_positions, received, strict=True):
            parts = piece.split([size for size, _ in expected[k]])
            for (_, addends), part in zip(expected[k], parts):
                addends[k] = part

    def _prepare_step(
        self, target: int, number: int, stage: SumStep, addends: dict[int, Tensor]
    ) -> _PreparedStep:
        """Return step ``number`` of the sum for ``target`` with its tensors, as ``_PreparedStep``.

        Starts to receive the sum that the step before it sends.
        """
        hosts, stages = self._hosts, self._routes[target]
        previous_sum, incoming = None, None
        if number:
            previous_sum = torch.empty_like(self._parts[target], dtype=self._sum_dtype)
            source = hosts.ranks[stages[number - 1].worker]
            name = self._message_name(target, number - 1)
            incoming = StartedMessages(
                name, previous_sum, [], [(source, previous_sum)], hosts.ranks
            )
        elif any(map(self._is_on_other_host, stage.adds)):
            incoming = self._started_messages[0]
        is_last = number == len(stages) - 1
        to = target if is_last else stages[number + 1].worker
        name = self._message_name(target, number)
        to = None if to == hosts.position else hosts.ranks[to]
        return _PreparedStep(
            previous_sum, incoming, [addends[k] for k in stage.adds], to, name, is_last
        )

    def _receive_total(self) -> None:
        """Start to receive this rank's part, if another rank carries out its last step."""
        hosts = self._hosts
        stages = self._routes.get(hosts.position, ())
        if not stages or stages[-1].worker == hosts.position:
            return
        self._total = torch.empty_like(self._parts[hosts.position])
        name, source = (
            self._message_name(hosts.position, len(stages) - 1),
            hosts.ranks[stages[-1].worker],
        )
        self._started_messages.append(
            StartedMessages(name, self._total, [], [(source, self._total)], hosts.ranks)
        )

    def _message_name(self, target: int, number: int) -> str:
        return f"{self._name}, sum {number} of part {target}"

    def _run_step(self, step: _PreparedStep) -> None:
        """Wait for the tensors of a step and add them; send the sum, or keep this rank's part."""
        if step.incoming is not None:
            self._started_messages[0].wait()  # addends of other hosts
            step.incoming.wait()
        pieces = [x.to(self._sum_dtype) for x in step.addends]
        if step.previous_sum is not None:
            pieces.insert(0, step.previous_sum)
        total = ordered_reduce(pieces, self._op)
        # Sums go from step to step in the wider dtype, and are rounded once, at the end.
        if step.is_last:
            total = total.to(self._parts[0].dtype)
        if step.to is None:
            self._total = total
            return
        ranks = self._hosts.ranks
        self._started_messages.append(
            StartedMessages(step.name, total, [(step.to, total)], [], ranks)
        )


def _concat(xs: Sequence[Tensor], empty: Tensor) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat([empty, *xs])


class HostsAllReduce:
    """Started all-reduce of a contiguous ``x`` by ``op``; ``wait()`` returns the result.

    Each rank on the host of the last rank gets the sum of one part of ``x``, and the sums are
    gathered from there. Between two hosts each byte is sent there and back once, which is the
    minimum. ``name``, ``hosts`` and ``inside`` are those of ``HostsReduceScatter``.
    """

    def __init__(self, name: str, x: Tensor, hosts: Hosts, inside: Transport, op: str) -> None:
        self._name, self._hosts, self._inside_transport = name, hosts, inside
        self._out, self._call = torch.empty_like(x), current_call()
        count = -(-x.nbytes // PIECE_BYTES)
        self._pieces = self._out.view(-1).tensor_split(count)
        self._sums = [
            HostsReduceScatter(
                name, self._parts_for_ranks(piece), hosts, inside, op=op, at_once=False
            )
            for piece in x.view(-1).tensor_split(count)
        ]
        self._gathers: list[HostsGather] = []

    def _parts_for_ranks(self, piece: Tensor) -> list[Tensor]:
        """Cut ``piece`` into a part for each rank to sum.

        Only ranks on the host of the last rank get numbers. The parts of other ranks are empty.
        """
        last_host_positions = self._hosts.positions_by_host[self._hosts.host_of[-1]]
        parts = dict(
            zip(last_host_positions, piece.tensor_split(len(last_host_positions)), strict=True)
        )
        return [parts.get(k, piece[:0]) for k in range(len(self._hosts.ranks))]

    def advance(self) -> None:
        """Wait until this rank's parts are summed, and start to gather the sums on all ranks."""
        sums, self._sums = self._sums, []
        for piece, reducing in zip(self._pieces, sums):
            parts = self._parts_for_ranks(piece)
            parts[self._hosts.position].copy_(reducing.wait())
            with resume_call(self._call):
                self._gathers.append(
                    HostsGather(
                        self._name,
                        parts[self._hosts.position],
                        parts,
                        self._hosts,
                        self._inside_transport,
                    )
                )

    def wait(self) -> Tensor:
        self.advance()
        for gathering in self._gathers:
            gathering.wait()
        return self._out


class OverlappingAllReduces:
    """Starts all-reduces so that successive ones overlap.

    An all-reduce sums parts and then gathers the sums. Starting one also starts the gather of the
    one before, if that is not waited for yet, so its messages travel while the new one sums.
    """

    def __init__(self) -> None:
        self._last_started: Callable[[], HostsAllReduce | None] = lambda: None  # weak

    def start(self, name: str, x: Tensor, hosts: Hosts, inside: Transport, op: str) -> Waitable:
        """Start an all-reduce of a contiguous ``x``; ``wait()`` returns the result.

        If ``x`` is short, the ranks gather all addends instead, which takes one round of messages.
        """
        if x.nbytes * (hosts.max_ranks_per_host - 1) <= ONE_ROUND_BYTES:
            pieces = [
                x if k == hosts.position else torch.empty_like(x) for k in range(len(hosts.ranks))
            ]
            return PendingResult(
                HostsGather(name, x, pieces, hosts, inside), lambda: ordered_reduce(pieces, op)
            )
        started = HostsAllReduce(name, x, hosts, inside, op)
        previous, self._last_started = self._last_started(), weakref.ref(started)
        if previous is not None:
            previous.advance()
        return started
