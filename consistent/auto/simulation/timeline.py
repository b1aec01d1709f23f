"""Conversion of the logged events to a timeline: what each simulated rank does at which time.

A rank computes while its two wires transfer messages, one inside its host and one between hosts.
Asynchronous messages occupy a wire one after another. On a GPU Python runs ahead of the device,
which is idle where Python is not fast enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...pipeline.simulate import simulate_schedule
from ...pipeline.table import Action
from ...spec import Placement
from ..machines import Machine
from .log import Message, ScheduleEvent, SimulatedOp
from .stages import SimulatedSchedule

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
    # rank -> time of the first send to it
    first_send_times: dict[int, float] = field(default_factory=dict)
    # link -> until when it is in use
    links_busy_until: dict[str, float] = field(default_factory=dict)
    pending_ends: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def op(self, event: SimulatedOp, machine: Machine) -> None:
        """Append an op of this rank."""
        seconds = machine.op_seconds(event.work, event.cold)
        host = machine.op_host_seconds(event.caller)
        self.host += host
        begin = max(self.now, self.host) if machine.host_overlaps else self.now
        duration = seconds if machine.host_overlaps else seconds + host
        self.now = begin + duration
        self.compute += duration
        self.flops += event.work.flops
        if not event.work.runs:
            return
        self.spans.append(Span(self.rank, "compute", event.work.op, begin, self.now, event.where))

    def meta_op(self, event: SimulatedOp, machine: Machine) -> None:
        """Append an op on a placement that the rank is not in; it costs Python time only."""
        seconds = machine.follow_seconds(event.work)
        self.now += seconds
        self.compute += seconds

    def message(self, event: Message, machine: Machine) -> None:
        """Append a message, or the begin or end of an asynchronous message."""
        if event.wait:
            done = self.pending_ends.pop(event.wait, self.now)
            self.exposed += max(0.0, done - self.now)
            self.now = max(self.now, done)
            return
        host = machine.message_host_seconds(event.caller, event.tensors)
        seconds = machine.message_seconds(event.name, event.bytes, event.ranks)
        if event.name == "send":  # continues during later work; the receiver waits for it
            self.now += host
            self.exposed += host
            self.first_send_times.setdefault(event.ranks[1], self.now)
            end = self.now + seconds
            self.spans.append(
                Span(self.rank, "wire", "send", self.now, end, event.where, event.bytes)
            )
            return
        seconds += host
        is_hidden = bool(event.start) and machine.host_overlaps
        links = machine.links(event.ranks)
        # A message waits until every link that it takes is free.
        begin = max([self.now, *(self.links_busy_until.get(link, 0.0) for link in links)])
        end = begin + seconds
        kind = "wire" if is_hidden else "boxing"
        where = event.where
        self.spans.append(Span(self.rank, kind, event.name, begin, end, where, event.bytes))
        if event.start:
            self.pending_ends[event.start] = end
        self.links_busy_until.update(dict.fromkeys(links, end))
        if is_hidden:
            self.hidden += seconds
        else:
            self.exposed += end - self.now
            self.now = end

    @property
    def end(self) -> float:
        """Time at which the rank and all messages that it began are done."""
        return max([self.now, *self.links_busy_until.values()])

    def wait(self, until: float) -> None:
        """Advance the clocks to ``until`` without doing anything."""
        self.now = self.host = until
        self.links_busy_until = {}


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

    def tracks_outside(self, placement: Placement | None) -> list[Track]:
        """Return the timelines of ranks outside ``placement``, which run its ops on ``meta``."""
        if placement is None or len(self.tracks) < 2:
            return []
        return [t for rank, t in self.tracks.items() if placement.coordinate_of(rank) is None]

    def track(self, rank: int) -> Track:
        """Return the track of a rank, created at its first event."""
        return self.tracks.setdefault(rank, Track(rank))


def timeline(events: Iterable[Any], machine: Machine) -> Timeline:
    """Return what each simulated rank does at which time, if ``events`` run on ``machine``."""
    result = Timeline()
    for event in events:
        if isinstance(event, SimulatedOp):
            result.track(event.rank).op(event, machine)
            if not machine.host_overlaps:
                for track in result.tracks_outside(event.placement):
                    track.meta_op(event, machine)
        elif isinstance(event, Message):
            result.track(event.rank).message(event, machine)
        elif isinstance(event, ScheduleEvent):
            _append_schedule(result, event.run, machine)
    return result


def _append_schedule(step_timeline: Timeline, run: SimulatedSchedule, machine: Machine) -> None:
    """Append a pipeline schedule to the timelines of its ranks, from the events of its actions."""
    tracks = {
        key: timeline_of_action(part.events, run.ranks[key[1]], machine)
        for key, part in run.action_events.items()
    }
    last = run.table.micro_batches - 1

    def track_of(action: Action) -> Track:
        return tracks[action.kind, action.stage, action.micro_batch == last]

    def send_seconds(earlier: Action, action: Action) -> float:
        message = run.events_of(earlier).sent.get(action.stage)
        if message is None or earlier.stage == action.stage:
            return 0.0
        sender = track_of(earlier)
        # Sent before the stage sums gradients.
        early = sender.now - sender.first_send_times[message[1][1]]
        host = machine.message_host_seconds("forward")
        return host + machine.message_seconds("send", *message) - early

    step_seconds, action_seconds = machine.schedule_host_seconds
    timing = simulate_schedule(
        run.table, lambda action: action_seconds + track_of(action).now, send_seconds
    )
    begin = step_timeline.seconds + step_seconds
    for rank in dict.fromkeys(run.ranks):
        step_timeline.track(rank).wait(begin)
    for action, (start, end) in timing.times.items():
        rank, part = run.ranks[action.stage], track_of(action)
        track = step_timeline.track(rank)
        track.compute += part.compute
        track.exposed += part.exposed
        track.hidden += part.hidden
        track.flops += part.flops
        sent = sum(span.bytes for span in part.spans)
        track.spans.append(
            Span(rank, action.kind, str(action), begin + start, begin + end, bytes=sent)
        )
    for rank in dict.fromkeys(run.ranks):
        track = step_timeline.track(rank)
        busy = sum(s.end - s.begin for s in track.spans if s.begin >= begin)
        track.idle += timing.seconds - busy
        track.wait(begin + timing.seconds)
    step_timeline.bubble, step_timeline.schedule = timing.bubble, run.table.name


def timeline_of_action(events: list[Any], rank: int, machine: Machine) -> Track:
    """Return the timeline of one action of ``rank`` as if it began at time 0.

    It is used to get the seconds of the action.
    """
    track = Track(rank)
    for event in events:
        if isinstance(event, SimulatedOp):
            track.op(event, machine)
        elif isinstance(event, Message):
            track.message(event, machine)
    return track
