"""Conversion of the logged events to a timeline: what each simulated rank does at which time.

A rank computes while its two wires transfer messages, one inside its host and one between hosts.
Asynchronous messages occupy a wire one after another. On a GPU Python runs ahead of the device,
which is idle where Python is not fast enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...pipeline.simulate import play
from ...pipeline.table import Action
from ...spec import Placement
from ..machines import Machine
from .log import Message, Scheduled, SimulatedOp
from .stages import FollowedSchedule

ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to inputs",
    "W": "backward to parameters",
}


@dataclass(slots=True)
class Span:
    """Interval of a rank's timeline, from ``begin`` to ``end`` in seconds, and what it does then.

    Args:
        kind: "compute", "boxing" (the rank waits for a message), "wire" (a message during other
            work) or the kind of an action of a pipeline stage, such as "F".
        name: the op, message or action.
        where: line of the program.
        bytes: bytes that are sent in it.
    """

    rank: int
    kind: str
    name: str
    begin: float
    end: float
    where: str = ""
    bytes: int = 0


@dataclass
class Track:
    """Timeline of one rank, to which events are appended in order, and sums of its seconds.

    ``now`` is when the device is done with what was appended, and ``host`` when Python is.
    ``compute``, ``exposed``, ``hidden`` and ``idle`` are the seconds of computing, of boxing that
    the rank waits for, of boxing while the rank computes, and of waiting for other stages.
    """

    rank: int
    now: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0  # boxing during which the rank does nothing else
    hidden: float = 0.0
    idle: float = 0.0  # waiting for other stages in a schedule
    flops: float = 0.0
    sending: dict[int, float] = field(default_factory=dict)  # rank -> time of the first send to it
    wires: dict[str, float] = field(default_factory=dict)  # link -> until when it is in use
    pending: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def op(self, event: SimulatedOp, machine: Machine) -> None:
        """Append an op of this rank."""
        seconds = machine.op_seconds(event.work, event.cold)
        host = machine.op_host_seconds(event.caller)
        self.host += host
        begin = max(self.now, self.host) if machine.host_overlaps else self.now
        lasts = seconds if machine.host_overlaps else seconds + host
        self.now = begin + lasts
        self.compute += lasts
        self.flops += event.work.flops
        if not event.work.runs:
            return
        self.spans.append(Span(self.rank, "compute", event.work.op, begin, self.now, event.where))

    def follow(self, event: SimulatedOp, machine: Machine) -> None:
        """Append an op on a placement that the rank is not in; it costs Python time only."""
        seconds = machine.follow_seconds(event.work)
        self.now += seconds
        self.compute += seconds

    def message(self, event: Message, machine: Machine) -> None:
        """Append a message, or the begin or end of an asynchronous message."""
        if event.wait:
            done = self.pending.pop(event.wait, self.now)
            self.exposed += max(0.0, done - self.now)
            self.now = max(self.now, done)
            return
        host = machine.message_host_seconds(event.caller, event.tensors)
        seconds = machine.message_seconds(event.name, event.bytes, event.ranks)
        if event.name == "send":  # continues during later work; the receiver waits for it
            self.now += host
            self.exposed += host
            self.sending.setdefault(event.ranks[1], self.now)
            end = self.now + seconds
            self.spans.append(
                Span(self.rank, "wire", "send", self.now, end, event.where, event.bytes)
            )
            return
        seconds += host
        beside = bool(event.start) and machine.host_overlaps
        links = machine.links(event.ranks)
        # A message waits until every link that it takes is free.
        begin = max([self.now, *(self.wires.get(link, 0.0) for link in links)])
        end = begin + seconds
        kind = "wire" if beside else "boxing"
        at = event.where
        self.spans.append(Span(self.rank, kind, event.name, begin, end, at, event.bytes))
        if event.start:
            self.pending[event.start] = end
        self.wires.update(dict.fromkeys(links, end))
        if beside:
            self.hidden += seconds
        else:
            self.exposed += end - self.now
            self.now = end

    @property
    def end(self) -> float:
        """Time at which the rank and all messages that it began are done."""
        return max([self.now, *self.wires.values()])

    def wait(self, until: float) -> None:
        """Advance the clocks to ``until`` without doing anything."""
        self.now = self.host = until
        self.wires = {}


@dataclass
class Timeline:
    """Timelines of all simulated ranks.

    ``bubble`` is the share of a pipeline schedule in which placements are idle, and ``schedule``
    its name; "" without a schedule.
    """

    tracks: dict[int, Track] = field(default_factory=dict)
    bubble: float = 0.0  # the share of a schedule in which placements stand idle, 0 to 1
    schedule: str = ""

    @property
    def seconds(self) -> float:
        """Time at which the last rank is done."""
        return max((track.end for track in self.tracks.values()), default=0.0)

    def outside(self, placement: Placement | None) -> list[Track]:
        """Return the timelines of ranks outside ``placement``, which run its ops on ``meta``."""
        if placement is None or len(self.tracks) < 2:
            return []
        return [t for rank, t in self.tracks.items() if placement.coordinate_of(rank) is None]

    def track(self, rank: int) -> Track:
        """Return the track of a rank, created at its first event."""
        return self.tracks.setdefault(rank, Track(rank))


def timeline(events: Iterable[Any], machine: Machine) -> Timeline:
    """Return what each simulated rank does at which time, if ``events`` run on ``machine``."""
    made = Timeline()
    for event in events:
        if isinstance(event, SimulatedOp):
            made.track(event.rank).op(event, machine)
            if not machine.host_overlaps:
                for track in made.outside(event.placement):
                    track.follow(event, machine)
        elif isinstance(event, Message):
            made.track(event.rank).message(event, machine)
        elif isinstance(event, Scheduled):
            _schedule(made, event.run, machine)
    return made


def _schedule(made: Timeline, run: FollowedSchedule, machine: Machine) -> None:
    """Append a pipeline schedule to the timelines of its ranks, from the events of its actions."""
    tracks = {
        key: alone(part.events, run.ranks[key[1]], machine) for key, part in run.parts.items()
    }
    last = run.table.micro_batches - 1

    def of(action: Action) -> Track:
        return tracks[action.kind, action.stage, action.micro_batch == last]

    def sending(before: Action, action: Action) -> float:
        found = run.part(before).sent.get(action.stage)
        if found is None or before.stage == action.stage:
            return 0.0
        made = of(before)
        early = made.now - made.sending[found[1][1]]  # sent before the stage sums gradients
        host = machine.message_host_seconds("forward")
        return host + machine.message_seconds("send", *found) - early

    step, each = machine.schedule_host_seconds
    played = play(run.table, lambda action: each + of(action).now, sending)
    begin = made.seconds + step
    for rank in dict.fromkeys(run.ranks):
        made.track(rank).wait(begin)
    for action, (start, end) in played.times.items():
        rank, part = run.ranks[action.stage], of(action)
        track = made.track(rank)
        track.compute += part.compute
        track.exposed += part.exposed
        track.hidden += part.hidden
        track.flops += part.flops
        sent = sum(span.bytes for span in part.spans)
        track.spans.append(
            Span(rank, action.kind, str(action), begin + start, begin + end, bytes=sent)
        )
    for rank in dict.fromkeys(run.ranks):
        track = made.track(rank)
        busy = sum(s.end - s.begin for s in track.spans if s.begin >= begin)
        track.idle += played.seconds - busy
        track.wait(begin + played.seconds)
    made.bubble, made.schedule = played.bubble, run.table.name


def alone(events: list[Any], rank: int, machine: Machine) -> Track:
    """Return the timeline of one action of ``rank`` as if it began at time 0.

    It is used to get the seconds of the action.
    """
    made = Track(rank)
    for event in events:
        if isinstance(event, SimulatedOp):
            made.op(event, machine)
        elif isinstance(event, Message):
            made.message(event, machine)
    return made
