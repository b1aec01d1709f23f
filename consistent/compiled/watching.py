"""Events of a running program for tracers and reports: its segments of ops, and each message.

```
step                         begins
  14 ops: 4x mm, add ...     begins, ends
  S(0) -all_gather-> B       begins, ends        a message, with its bytes
  all_reduce                 begins              a message that runs concurrently with the ops
  9 ops: ...
  wait for all_reduce        begins, ends
step                         ends
```

Inductor may move ops across messages; such an op counts where it was recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..drawing.words import short_site, site_of, times
from ..spec.tracer import callbacks
from .listing import is_item, row
from .opaque import ORDERED_OPS

Program = Segment = Any  # defined in program.py, which imports this file


@dataclass(frozen=True, eq=False, slots=True)
class ProgramEvent:
    """One event that tracers and profiles get from a running program, at its begin and its end.

    Args:
        kind: "step", "ops", "message", "start" or "wait for" (of a started message), "graph break".
        step: name of the step.
        name: text that says what happens, such as the names of the ops.
        where: ``file:line`` of the step; for several ops, that of the first.
        detail: the layout of a message's result; for several ops, the line of the last one.
        sent: bytes that this rank sends.
    """

    kind: str
    step: str
    name: str
    where: str = ""
    detail: str = ""
    sent: int = 0


_ON_COMPILED = callbacks("on_compiled")  # called for a "start" at its begin only


@dataclass
class SegmentEvents:
    """Events of one segment, in the order ops, message, ops, ..., message, ops.

    Args:
        ops: the ops before each message, and those after the last; None where there are none.
        messages: the messages, with starts and waits, in order.
        indices: ``OpaqueCall.number`` -> indices in ``messages``. Equal messages have the same
            number.
    """

    ops: list[ProgramEvent | None] = field(default_factory=list)
    messages: list[ProgramEvent] = field(default_factory=list)
    indices: dict[int, list[int]] = field(default_factory=dict)


class EventReporter:
    """Context in which a program runs while a tracer listens; it reports the events of one run."""

    def __init__(self, program: Program) -> None:
        self._program = program
        if program.events is None:
            program.events = [_events_of_segment(program, part) for part in program.segments]
        self._step_event = ProgramEvent("step", program.name, program.name)
        self._current_event: ProgramEvent | None = None
        self._events_by_segment: list[SegmentEvents] = program.events
        self._events, self._message_counts = SegmentEvents(), Counter[int]()

    def __enter__(self) -> EventReporter:
        _notify_tracers(self._step_event, True)
        return self

    def __exit__(self, *_: Any) -> None:
        _notify_tracers(self._step_event, False)

    def segment(self, number: int, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run segment ``number`` as ``run(*inputs)``, report its ops, and return its result."""
        self._events, self._message_counts = self._events_by_segment[number], Counter()
        self._begin_event(self._events.ops[0])
        try:
            return run(*inputs)
        finally:
            self._end_event()

    @contextmanager
    def observe_call(self, number: int) -> Iterator[None]:
        """Report to tracers the message that the block sends or waits for, by its call number.

        The event of the ops before it ends when the block begins; that of the ops after it begins
        at the end of the block.
        """
        # Equal messages share a number, so the count of those seen so far shows which one this is.
        index = self._events.indices[number][self._message_counts[number]]
        self._message_counts[number] += 1
        event = self._events.messages[index]
        self._end_event()
        _notify_tracers(event, True)
        try:
            yield
        finally:
            if event.kind != "start":
                _notify_tracers(event, False)
            self._begin_event(self._events.ops[index + 1])

    def graph_break(self, part: Segment) -> None:
        """Run the call at the graph break after segment ``part``, and report it to tracers."""
        assert part.graph_break is not None
        event = ProgramEvent("graph break", self._program.name, part.text)
        _notify_tracers(event, True)
        try:
            part.graph_break()
        finally:
            _notify_tracers(event, False)

    def _begin_event(self, event: ProgramEvent | None) -> None:
        self._current_event = event
        if event is not None:
            _notify_tracers(event, True)

    def _end_event(self) -> None:
        if self._current_event is not None:
            _notify_tracers(self._current_event, False)
            self._current_event = None


def _notify_tracers(event: ProgramEvent, begins: bool) -> None:
    for notify in list(_ON_COMPILED):
        notify(event, begins)


def _events_of_segment(program: Program, part: Segment) -> SegmentEvents:
    events, ops = SegmentEvents(), []
    for node in part.graph.graph.nodes:
        if node.target in ORDERED_OPS:
            events.ops.append(_ops_event(program, ops))
            events.indices.setdefault(node.args[1], []).append(len(events.messages))
            events.messages.append(_message_event(program, node))
            ops = []
        elif node.op == "call_function" and not is_item(node) and not _is_view(node):
            ops.append(node)
    events.ops.append(_ops_event(program, ops))
    return events


def _ops_event(program: Program, nodes: list[Node]) -> ProgramEvent | None:
    if not nodes:
        return None
    op_rows = [row(program, node, {}) for node in nodes]
    names = Counter(op_row.name for op_row in op_rows)
    most_common = ", ".join(times(name, n) for name, n in names.most_common(3))
    more = f" and {len(names) - 3} other kinds" if len(names) > 3 else ""
    name = f"{len(nodes)} ops: {most_common}{more}" if len(nodes) > 1 else most_common
    first, last = (site_of(op_rows[i].where) for i in (0, -1))
    detail = f"to {short_site(last)}" if last != first else ""
    return ProgramEvent("ops", program.name, name, first, detail)


def _message_event(program: Program, node: Node) -> ProgramEvent:
    message_row = row(program, node, {})
    return ProgramEvent(
        message_row.kind,
        program.name,
        message_row.boxing_text,
        site_of(message_row.where),
        message_row.layout,
        message_row.sent or 0,
    )


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
