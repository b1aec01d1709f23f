"""Judges the events that ranks have noted: whether a GPU may go wrong or wait for ever.

```
stream      runs what is asked of it in order; another stream's work comes before only if waited for
collective  begins on a rank when its stream has come to it, and ends when it has begun on all
memory      goes back to the stream that it was made on, which may use it again at once
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import Any

from tests.streams.noted import Event

Clock = dict[str, int]  # stream -> how much of its work has been done
SENT = ("start", "meet", "barrier")
SHOWN = 8


def faults(ranks: Sequence[Sequence[Event]]) -> list[str]:
    """All that is wrong with what the ranks ask for; empty if nothing is."""
    found = [
        f"rank {rank}: {fault}"
        for rank, events in enumerate(ranks)
        for fault in Uses(events).faults
    ]
    return [*found, *order_faults(ranks), *cycles(ranks)]


class Uses:
    """Follows a rank's events, with what each stream knows to be done.

    Two uses of one memory on two streams, one of which writes, must be ordered. When memory is
    freed, the stream that it was made on must know all uses to be done, or they must have been told
    to the allocator by `record_stream`.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.faults: list[str] = []
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._host: Clock = {}
        self._events: dict[Any, Clock] = {}
        self._ends: dict[Any, Clock] = {}
        self._owners: dict[int, str] = {}
        self._streams: dict[int, set[str]] = defaultdict(set)
        self._written: dict[int, tuple[str, int, Any]] = {}
        self._used: dict[int, dict[str, tuple[int, Any]]] = defaultdict(dict)
        for event in events:
            getattr(self, f"_{event.kind}")(event)

    def _run(self, stream: str, event: Event, what: Any) -> None:
        clock = self._clocks[stream]
        _merge(clock, self._host)
        clock[stream] = now = clock.get(stream, 0) + 1
        for memory in event.reads:
            self._ordered(memory, stream, what, [self._written.get(memory)])
        for memory in event.writes:
            used = [(name, *use) for name, use in self._used[memory].items()]
            self._ordered(memory, stream, what, [self._written.get(memory), *used])
            self._written[memory] = stream, now, what
        for memory in {*event.reads, *event.writes}:
            self._used[memory][stream] = now, what

    def _ordered(self, memory: int, stream: str, what: Any, before: Sequence[Any]) -> None:
        for use in before:
            if use is not None and self._clocks[stream].get(use[0], 0) < use[1]:
                self.faults.append(
                    f"{what} on {stream} does not wait for {use[2]} on {use[0]}, "
                    f"which uses the same memory ({memory})"
                )

    def _op(self, event: Event) -> None:
        self._run(event.stream, event, event.what)

    _barrier = _op

    def _record(self, event: Event) -> None:
        self._events[event.what] = dict(self._clocks[event.stream])

    def _wait(self, event: Event) -> None:
        _merge(self._clocks[event.stream], self._events[event.what])

    def _start(self, event: Event) -> None:
        comm, _, _ = event.what
        _merge(self._clocks[comm], self._clocks[event.stream])
        self._run(comm, event, event.what)
        self._ends[event.what] = dict(self._clocks[comm])

    def _join(self, event: Event) -> None:
        _merge(self._clocks[event.stream], self._ends[event.what])

    def _sync(self, event: Event) -> None:
        _merge(self._host, self._clocks[event.stream])

    def _meet(self, event: Event) -> None:
        pass

    def _made(self, event: Event) -> None:
        self._owners[event.writes[0]] = event.stream

    def _held(self, event: Event) -> None:
        self._streams[event.writes[0]].add(event.stream)

    def _freed(self, event: Event) -> None:
        (memory,) = event.writes
        owner = self._owners[memory]
        for stream, (use, what) in self._used.pop(memory, {}).items():
            knows = {**self._host, **self._clocks[owner]}.get(stream, 0) >= use
            if stream != owner and not knows and stream not in self._streams[memory]:
                self.faults.append(
                    f"memory {memory} goes back to {owner} while {what} on {stream} may still use "
                    "it: neither recorded there nor waited for"
                )


def _merge(clock: Clock, other: Clock) -> None:
    for stream, done in other.items():
        if clock.get(stream, 0) < done:
            clock[stream] = done


def order_faults(ranks: Sequence[Sequence[Event]]) -> list[str]:
    """Where two ranks differ in the collectives of a communicator, or in their order."""
    calls: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for rank, events in enumerate(ranks):
        for event in events:
            if event.kind in SENT:
                calls[event.what[0]].setdefault(rank, []).append(event.what[2])
    found = []
    for comm, each in calls.items():
        (first, wanted), *others = each.items()
        for rank, made in others:
            if made != wanted:
                both = zip_longest(made, wanted)
                k = next(k for k, (a, b) in enumerate(both) if a != b)
                found.append(f"{comm}, call {k}: ranks {first} and {rank} do not make the same")
    return found


def cycles(ranks: Sequence[Sequence[Event]]) -> list[str]:
    """The circles of waits, of which there may be none: neither between streams, nor where a GPU
    has room for one collective at a time and begins them as the process asks for them."""
    found = []
    for why, one_at_a_time in (
        ("streams wait", False),
        ("with one collective at a time, ranks wait", True),
    ):
        try:
            TopologicalSorter(_waits(ranks, one_at_a_time)).prepare()
        except CycleError as error:
            circle = [f"rank {node[0]} {node[1]} {node[2:]}" for node in error.args[1][:SHOWN]]
            found.append(f"{why} in a circle: {' <- '.join(circle)}")
    return found


def _waits(ranks: Sequence[Sequence[Event]], one_at_a_time: bool) -> dict[Any, set[Any]]:
    """Node -> those that come before it."""
    before: dict[Any, set[Any]] = {}
    meetings: dict[Any, list[int]] = defaultdict(list)
    for rank, events in enumerate(ranks):
        for what in _follow(rank, events, before, one_at_a_time):
            meetings[what].append(rank)
    for what, members in meetings.items():
        for rank in members:
            before[rank, "ends", *what] |= {(other, "begins", *what) for other in members}
    return before


def _follow(
    rank: int, events: Sequence[Event], before: dict[Any, set[Any]], one_at_a_time: bool
) -> list[tuple[str, int]]:
    """Adds a rank's waits, and gives its collectives."""
    last: dict[str, Any] = {}  # stream, or "" for the process -> what it did last
    recorded: dict[Any, Any] = {}
    made: list[tuple[str, int]] = []

    def node(*name: Any, after: Iterable[Any]) -> Any:
        key = rank, *name
        before[key] = {x for x in after if x is not None}
        return key

    for at, event in enumerate(events):
        here = last.get(event.stream)
        if event.kind == "record":
            recorded[event.what] = here
        elif event.kind == "wait":
            after = here, recorded[event.what]
            last[event.stream] = node("waits", at, after=after)
        elif event.kind == "join":
            after = here, (rank, "ends", *event.what[:2])
            last[event.stream] = node("waits", at, after=after)
        elif event.kind == "sync":
            last[""] = node("waits", at, after=(here, last.get("")))
        elif event.kind in SENT:
            line = event.what[0] if event.kind == "start" else event.stream
            after = [here, last.get(line), last.get("")]
            if one_at_a_time and made:
                after.append((rank, "ends", *made[-1]))
            begun = node("begins", *event.what[:2], after=after)
            last[line] = node("ends", *event.what[:2], after=[begun])
            made.append(event.what[:2])
    return made
