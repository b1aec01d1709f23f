r"""Outer optimizer: steps the parameters that islands share by the mean difference between islands.

```
island 0   start -> step, step, ... step -> its own      \
                                                           mean of (start - its own)  ->  start
island 1   start -> step, step, ... step -> its own      /                                  |
                     parameters of both  <--------------------------------------------------+
```

Every rank has a shard of each parameter and exchanges values with the ranks that have the same
shard in the other islands. Each rank sends only its own shard, and nothing is gathered inside an
island.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.codecs import codec_of_dtype
from mirrored.every_rank import gather_from_ranks
from mirrored.transports.torch_dist.islands import IslandConnection

from ..dispatch.plans.shards import is_global, plain
from .meetings import Attendee, Meetings

# Floating dtypes that cannot hold a difference: powers of two without a sign, and pairs of numbers
# in one byte, which torch cannot cast to.
_UNFIT_DTYPES = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


@dataclass
class Part:
    """Parameters that islands average at the same step, with the state of their meetings.

    A meeting is one exchange between islands; those of one part are numbered from 1. ``Outer`` has
    ``parts`` of these, which are exchanged at different steps.

    Attributes:
        name, names: the name of the part, and the names of its parameters.
        number: number of the next meeting of the part.
        met: number of the last meeting in which this island took part.
        late: whether the last meeting was held without this island.
        is_new: whether this island started after the others had already met.
    """

    name: str
    names: list[str]
    number: int = 1
    met: int = 0
    late: bool = False
    is_new: bool = False

    def meeting(self, number: int | None = None) -> str:
        """Return the name of meeting ``number`` of this part, such as ``part 0/7``.

        By default, that of the next one.
        """
        return f"part {self.name}/{self.number if number is None else number}"


@dataclass
class ExchangeResult:
    """Result of an exchange between islands, which ``Outer`` applies after all report success.

    Attributes:
        means: the mean over islands of (start - current), for this rank's shard of each parameter,
            where start is the parameter after the last meeting.
        starts, states: this rank's shard of each start, and the outer optimizer's state of each
            parameter, for islands that missed a meeting. Empty if all have attended the last one.
        ends: whether training ends with this meeting.
    """

    means: dict[str, Tensor]
    starts: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    ends: bool


class Outer:
    """Averages parameters between islands every ``every`` steps; ``Islands.outer`` returns it.

    It keeps a copy of each parameter as of the last exchange, and steps the copies with a torch
    optimizer (the outer one). Their gradient is the mean over islands of (copy - parameter). The
    result becomes the parameter on all islands.

    Attributes:
        steps: number of calls of `step` so far. An island that was late, or that was started
            again, takes over the count of the islands that it meets.
        optimizer: the outer optimizer of the copies; its learning rate may be changed.
    """

    def __init__(
        self,
        meetings: Meetings,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        every: int,
        parts: int,
        dtype: torch.dtype | None,
    ) -> None:
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._meetings = meetings
        attendees = self._first_meeting(params, (every, parts, dtype))
        # Only after the first meeting: islands now have the same arguments, so all raise.
        _check_arguments(params, every, parts, dtype)
        self.steps, self._every, self._dtype = 0, every, dtype
        self._params = params
        first_shards = None
        if attendees is not None:
            first_shards = self._meetings.hold(
                "first", attendees, lambda line, _: _shards_of_first_island(line, params)
            )
        with torch.no_grad():
            for name, shard in (first_shards or {}).items():
                params[name].copy_(_new_from_shard(params[name], shard))
            self._start = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
        self._parts = [Part(str(k), names) for k, names in enumerate(_divide_params(params, parts))]
        for part in self._parts:
            part.is_new = first_shards is None
        self.optimizer = optimizer(list(self._start.values()))

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this rank has sent to other islands."""
        return self._meetings.sent

    def step(self) -> bool:
        """Count one step of this island; call it after the step of the inner optimizer.

        Every ``every`` steps islands meet, that is, exchange what they have learned: the outer
        optimizer takes a step, and its result becomes the parameters on all islands.

        An island that comes too late to a meeting trains on alone, and joins the next meeting as
        soon as another island arrives there.

        Returns:
            Whether a meeting was held with this island.
        """
        self.steps += 1
        was_held, every, count = False, self._every, len(self._parts)
        # Part k of n is due at step every * k / n of each interval, the last part at its end. All
        # are computed before any part meets, because a late island takes over the step count of the
        # others in a meeting: another part that was due would then skip its meeting unnoticed.
        dues = [self.steps % every == every * k // count % every for k in range(1, count + 1)]
        for part, due in zip(self._parts, dues, strict=True):
            if due or part.late and self._meetings.has_begun(part.meeting()):
                was_held = self._hold_meeting(part, due, ends=False) or was_held
        return was_held

    def finish(self) -> None:
        """Set each parameter to the mean over islands, at the end of training.

        The outer optimizer does not step, because no later step would correct how far it goes
        beyond the mean. All islands must call it; the parameters are then equal on all islands that
        meet.
        """
        for part in self._parts:
            self._hold_meeting(part, due=True, ends=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, the parameters as of the last meeting, and the optimizer's state.

        They are the same on all islands, except between the meetings of different parts.
        """
        start = {name: x.detach() for name, x in self._start.items()}
        return {"steps": self.steps, "start": start, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.steps = state["steps"]
        with torch.no_grad():
            for name, x in state["start"].items():
                self._start[name].copy_(x)
        self.optimizer.load_state_dict(state["optimizer"])

    def _first_meeting(
        self, params: Mapping[str, Tensor], figures: tuple[Any, ...]
    ) -> list[Attendee] | None:
        """Return the islands that start together, after checking that they train the same model.

        None if the others have started without this island.

        Args:
            params: the parameters by name, whose shapes, dtypes and layouts are compared.
            figures: (every, parts, dtype), which are compared, too.

        Raises:
            ValueError: islands differ in them.
        """
        text = "\n".join([*_describe_params(params), str(figures)])
        digest = hashlib.sha256("".join(gather_from_ranks(text)).encode()).hexdigest()
        attendees = self._meetings.attend("first", {"digest": digest})
        differing = [each.island for each in attendees or () if each.note["digest"] != digest]
        if differing:
            raise ValueError(
                f"islands.outer: island {self._meetings.number} has {len(params)} parameters and "
                f"(every, parts, dtype) = {figures}, and islands {differing} have others. "
                "Build the "
                "same model under the same plan on every island, and give the same figures."
            )
        return attendees

    @torch.no_grad()
    def _hold_meeting(self, part: Part, due: bool, ends: bool) -> bool:
        """Exchange the parameters of ``part`` with the other islands, and step the outer optimizer.

        Args:
            part: the part.
            due: whether this island meets at its own time, and not because others have begun.
            ends: at the end of training: make parameters the plain mean, without an optimizer step.

        Returns:
            whether this island took part.
        """
        note = {"met": part.met, "new": part.is_new, "ends": ends}
        # A late island sends 0, so it takes over the step count of the islands that are on time:
        # with its own count, it would come to all later meetings at another time than they do.
        note["steps"] = self.steps if due else 0
        may_hold = partial(self._may_hold, part)
        attendees = self._meetings.attend(part.meeting(), note, may_hold)
        exchanged = None
        if attendees is not None:
            exchanged = self._meetings.hold(
                part.meeting(), attendees, partial(self._exchange, part), may_hold
            )
        if attendees is None or exchanged is None:
            # Skip all meetings that were already held, up to the first one that this island can
            # still join.
            while self._meetings.is_over(part.meeting()):
                part.number += 1
            part.late = True
            self._meetings.request_wait(part.meeting())
            return False
        self.steps = max(each.note["steps"] for each in attendees)
        for name, shard in exchanged.starts.items():
            self._start[name].copy_(_new_from_shard(self._start[name], shard))
            self.optimizer.state[self._start[name]].update(exchanged.states[name])
        for name, mean in exchanged.means.items():
            start = self._start[name]
            start.grad = _new_from_shard(start, mean.view(_shard(start).shape))
        if exchanged.ends:
            for start in (self._start[name] for name in part.names):
                start.sub_(start.grad)  # type: ignore[arg-type]
        else:
            self.optimizer.step()
        # The step above left other parts unchanged: their parameters have no gradient.
        self.optimizer.zero_grad()
        for name in part.names:
            self._params[name].copy_(self._start[name])
        part.met = part.number
        part.number += 1
        part.late = part.is_new = False
        return True

    def _may_hold(self, part: Part, attendees: list[Attendee]) -> bool:
        """Return whether the islands in ``attendees`` may hold the next meeting of ``part``.

        The result of a meeting becomes the parameters of all islands, so it must not start from an
        outdated state. All islands together may hold it, and so may several if one of them is not
        new. One alone may hold it only if no meeting was held since its last one.
        """
        last_meetings = [each.note["met"] for each in attendees if not each.note["new"]]
        if len(attendees) == self._meetings.count or len(attendees) > 1 and last_meetings:
            return True
        # One island may hold it if no meeting was held after the last one that it attended.
        missed = (part.meeting(k) for k in range(max(last_meetings, default=0) + 1, part.number))
        return bool(last_meetings) and not any(map(self._meetings.was_held, missed))

    def _exchange(
        self, part: Part, line: IslandConnection, attendees: list[Attendee]
    ) -> ExchangeResult:
        """Average (start - current) over islands; start is the parameter after the last meeting.

        Passed to ``Meetings.hold``, so it changes nothing here. Islands that missed meetings or are
        new also get the starts and the optimizer's state of an island that attended the last one.

        Args:
            part: the parameters to average.
            line: the connection between the islands.
            attendees: the islands that take part, with their notes.
        """
        deltas = {n: (_shard(self._start[n]) - _shard(self._params[n])).cpu() for n in part.names}
        # A new island has nothing that others need, even if no island has met before.
        holder = max(
            range(len(attendees)),
            key=lambda k: (not attendees[k].note["new"], attendees[k].note["met"]),
        )
        last_meeting = attendees[holder].note["met"]
        starts: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {}
        if any(each.note["met"] != last_meeting or each.note["new"] for each in attendees):
            starts = {
                n: _broadcast_tensor(line, holder, _shard(self._start[n])) for n in part.names
            }
            states = {n: self._broadcast_state(self._start[n], line, holder) for n in part.names}
        if part.is_new:
            deltas = {n: torch.zeros_like(x) for n, x in deltas.items()}
        # New islands contribute zeros, so they do not count in the mean.
        contributors = sum(not each.note["new"] for each in attendees)
        means: dict[str, Tensor] = {}
        for dtype in sorted({self._params[n].dtype for n in part.names}, key=str):
            names = [n for n in part.names if self._params[n].dtype == dtype]
            flat = torch.cat([deltas[n].reshape(-1) for n in names])
            mean = _mean_over_islands(line, flat, self._dtype, max(1, contributors))
            means |= dict(zip(names, mean.split([deltas[n].numel() for n in names]), strict=True))
        return ExchangeResult(means, starts, states, any(each.note["ends"] for each in attendees))

    def _broadcast_state(
        self, start: Tensor, line: IslandConnection, holder: int
    ) -> dict[str, Tensor]:
        """Broadcast the outer optimizer's state of a parameter from one island, and return it.

        The state consists of tensors that have the layout of the parameter, or one element.

        Args:
            start: the parameter, as of the last meeting.
            line: the connection between the islands.
            holder: the position in ``line`` of the island that sends.
        """
        state, received = self.optimizer.state[start], {}
        kinds = [(key, x.dtype, x.ndim > 0) for key, x in state.items() if isinstance(x, Tensor)]
        for key, dtype, is_laid in _broadcast_object(line, holder, kinds):
            if is_laid:
                value = state[key] if key in state else torch.zeros_like(start, dtype=dtype)
                received[key] = _new_from_shard(
                    value, _broadcast_tensor(line, holder, _shard(value))
                )
            else:
                received[key] = _broadcast_tensor(
                    line, holder, state.get(key, torch.zeros((), dtype=dtype))
                )
        return received


def _mean_over_islands(
    line: IslandConnection, flat: Tensor, dtype: torch.dtype | None, count: int
) -> Tensor:
    """Return the sum of ``flat`` over islands, divided by ``count``.

    Complex numbers are sent as pairs of real ones: a cast to a real dtype would drop half of each.

    Args:
        line: the connection between the islands.
        flat: the numbers of this island.
        dtype: the real dtype to which sent numbers are rounded; None sends all of their bits.
        count: the number of islands that contribute, fewer than all if some send zeros.
    """
    if flat.is_complex():
        pairs = torch.view_as_real(flat).view(-1)
        return torch.view_as_complex(_mean_over_islands(line, pairs, dtype, count).view(-1, 2))
    return line.mean(flat, codec_of_dtype(dtype or flat.dtype), count)


def _broadcast_tensor(line: IslandConnection, holder: int, value: Tensor) -> Tensor:
    """Broadcast ``value`` from the island at position ``holder`` of ``line`` to all its islands.

    Returns the values in new memory of the CPU. ``value`` has the same shape and dtype on each.
    """
    buffer = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    line.broadcast(buffer, holder)
    return buffer


def _broadcast_object(line: IslandConnection, holder: int, value: Any) -> Any:
    """Broadcast a picklable object from the island at position ``holder``, and return it on all.

    Args:
        line: the connection between the islands.
        holder: the position in ``line`` of the island that sends.
        value: this island's value, which is sent if it is the holder.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    line.broadcast(size, holder)
    # Every island needs a buffer of the holder's size; its content matters only on the holder.
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    buffer[: len(data)] = data[: int(size)]
    line.broadcast(buffer, holder)
    return pickle.loads(buffer.numpy().tobytes())


def _shard(x: Tensor) -> Tensor:
    """Return this rank's shard of ``x``, which shares its storage; empty if the rank holds none."""
    shard = plain(x) if is_global(x) else x
    return shard.detach() if not shard.is_meta else torch.empty(0, dtype=x.dtype)


def _shards_of_first_island(
    line: IslandConnection, params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the first island's shards of all parameters by name, which each island starts with."""
    return {name: _broadcast_tensor(line, 0, _shard(p)) for name, p in params.items()}


def _new_from_shard(x: Tensor, shard: Tensor) -> Tensor:
    """Return a new tensor in the layout of ``x``, whose shard on this rank has values ``shard``."""
    result = torch.zeros_like(x)
    _shard(result).copy_(shard)
    return result


def _divide_params(params: Mapping[str, Tensor], parts: int) -> list[list[str]]:
    """Divide the parameters, in order, into at most ``parts`` lists of about equal size.

    Sizes are numbers of elements: sizes 4, 4, 8 in two parts are ``[[a, b], [c]]``.
    """
    total, numel_before = sum(p.numel() for p in params.values()), 0
    lists: list[list[str]] = [[] for _ in range(parts)]
    for name, p in params.items():
        lists[min(parts - 1, numel_before * parts // max(1, total))].append(name)
        numel_before += p.numel()
    return [names for names in lists if names]


def _check_arguments(
    params: Mapping[str, Tensor], every: int, parts: int, dtype: torch.dtype | None
) -> None:
    """Raise ValueError if an argument of ``Islands.outer`` is invalid."""
    if not params:
        raise ValueError("islands.outer: the model has no parameter that requires a gradient.")
    if every < 1:
        raise ValueError(f"islands.outer: every={every}. Give 1 step or more.")
    if not 1 <= parts <= every:
        raise ValueError(
            f"islands.outer: parts={parts} with every={every}. Each part meets at a step of its "
            f"own: give 1 to {every}."
        )
    if dtype in _UNFIT_DTYPES or dtype not in (None, torch.int8) and not dtype.is_floating_point:
        raise ValueError(
            f"islands.outer: dtype={dtype}. Give torch.bfloat16 or another floating dtype, or "
            "torch.int8."
        )


def _describe_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line of text for each parameter, by which islands compare their models."""
    for name, p in params.items():
        yield f"{name} {tuple(p.shape)} {p.dtype} {p._spec if is_global(p) else 'plain'}"
