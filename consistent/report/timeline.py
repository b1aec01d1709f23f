"""Record when each op, redistribution (boxing) and backward pass of this rank began and ended.

The time of an op is that of the whole call and includes its boxings. A boxing that runs
concurrently with the program, such as the sum of small gradients, has no end. A compiled step is
recorded as the ops between its messages, several ops as one event, and its messages as boxings.

On a GPU, times are those at which this process submitted the work, not those at which the device
did it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from mirrored.transports.default import current

from ..autograd import backward
from ..boxing.plan import plan_bytes
from ..boxing.steps import Step
from ..compiled import watching
from ..dispatch.plans import plan as plans
from ..movement import check_mode
from ..spec import TensorSpec
from ..spec.tracer import Tracer
from .lines import sbps

MAX_EVENTS = 100_000  # later events are counted, but not kept


@dataclass(slots=True)
class Event:
    """One event of this rank.

    Args:
        kind: "op", "boxing", "backward", or "step" (a compiled step).
        name: name of the op, or the moves of the boxing.
        begin, end: times in nanoseconds of ``time.perf_counter_ns``. There is no end if the event
            runs concurrently with the program, or if an error ended it.
        site: ``file:line`` of the program; "" inside the backward pass.
        detail: layouts of the op, or the op that a boxing was for.
        nbytes: bytes that the busiest rank sends; in a compiled step, bytes that this rank sends.
        thread: identifier of the thread.
    """

    kind: str
    name: str
    begin: int
    site: str = ""
    detail: str = ""
    nbytes: int = 0
    thread: int = field(default_factory=threading.get_ident)
    end: int | None = None

    @property
    def seconds(self) -> float:
        """The duration of the event; 0 if it is not known."""
        return 0.0 if self.end is None else (self.end - self.begin) / 1e9


class Timeline:
    """The events of this rank, in the order in which they began.

    ``left_out`` is the number of later events, which are not kept.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.left_out = 0
        self.rank: int | None = None
        # Per thread: stack of (key, event) that have not ended.
        self._open_events = threading.local()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of computing, and of redistributions (boxing) that were waited for.

        The keys are "computing" and "boxing". The time that an op spent in its boxings counts as
        boxing; the rest of the backward pass counts as computing.
        """
        spent = {"computing": 0.0, "boxing": 0.0}
        for begin, end, kind in self._own_intervals():
            spent["boxing" if kind == "boxing" else "computing"] += (end - begin) / 1e9
        return spent

    def _own_intervals(self) -> Iterator[tuple[int, int, str]]:
        """Yield (begin, end, kind) of each interval in which an event runs, but none nested in it.

        Example: an op from 0 to 10 with a boxing from 4 to 6 gives op 0-4, boxing 4-6, op 6-10.
        """
        stacks: dict[int, list[list]] = {}
        for event in self.events:
            if event.end is None:
                continue
            # Open events as [time up to which they are accounted for, end, kind], innermost last.
            stack = stacks.setdefault(event.thread, [])
            while stack and stack[-1][1] <= event.begin:
                begin, end, kind = stack.pop()
                if end > begin:
                    yield begin, end, kind
                if stack:
                    stack[-1][0] = max(stack[-1][0], end)
            if stack and event.begin > stack[-1][0]:
                yield stack[-1][0], event.begin, stack[-1][2]
            stack.append([event.begin, event.end, event.kind])
        for stack in stacks.values():
            while stack:
                begin, end, kind = stack.pop()
                if end > begin:
                    yield begin, end, kind
                if stack:
                    stack[-1][0] = max(stack[-1][0], end)

    # -- callbacks of the tracer -------------------------------------------------------------------

    def recording(self) -> AbstractContextManager[None]:
        """Return a context manager that records times inside its block."""
        return Tracer(
            on_op_begin=self._op_starts,
            on_op_end=self._op_ends,
            on_boxing_begin=self._boxing_starts,
            on_boxing_end=self._boxing_ends,
            on_backward=self._backward,
            on_compiled=self._on_compiled,
        ).tracing()

    def _op_starts(self, plan: plans.Plan) -> None:
        self._start(Event("op", plan.name, 0, check_mode.call_site()), plan)

    def _op_ends(
        self, plan: plans.Plan, _: Any, __: Any, ins: list[TensorSpec], outs: list[TensorSpec]
    ) -> None:
        event = self._end(plan)
        if event is not None:
            event.detail = f"{sbps(ins)} -> {sbps(outs)}"

    def _boxing_starts(self, src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...]) -> None:
        inside = backward.in_backward()
        site = "" if inside else check_mode.call_site()
        op = "backward" if inside else check_mode.current_op()
        name = ", ".join(map(str, moves)) or f"{src.sbp} to {dst.sbp}, nothing to move"
        self._start(Event("boxing", name, 0, site, op, plan_bytes(moves)), (src, dst))

    def _boxing_ends(self, src: TensorSpec, dst: TensorSpec) -> None:
        self._end((src, dst))

    def _backward(self, starts: bool) -> None:
        if starts:
            self._start(Event("backward", "backward", 0, check_mode.call_site()), "backward")
        else:
            self._end("backward")

    def _on_compiled(self, what: watching.ProgramEvent, begins: bool) -> None:
        if not begins:
            self._end(what)
            return
        is_call, sends = what.kind == "step", what.kind in ("message", "start", "wait for")
        site = check_mode.call_site() if is_call else what.where
        name = f"{what.name}, compiled" if is_call else what.name
        kind = "step" if is_call else "boxing" if sends else "op"
        self._start(Event(kind, name, 0, site, what.detail, what.sent), what)

    def _start(self, event: Event, key: object) -> None:
        if self.rank is None:
            self.rank = current().rank
        if len(self.events) >= MAX_EVENTS:
            self.left_out += 1
        else:
            self.events.append(event)
        self._stack().append((key, event))
        # The clock is read last, so that the bookkeeping above does not count.
        event.begin = time.perf_counter_ns()

    def _end(self, key: object) -> Event | None:
        """End the innermost open event with this key, and return it; None if there is none.

        ``key`` is what ``_start`` got, such as the plan of an op. Open events inside it are
        forgotten without an end: they run concurrently with the program, or were ended by an error.
        """
        now, stack = time.perf_counter_ns(), self._stack()
        for i in range(len(stack) - 1, -1, -1):
            if stack[i][0] is key or stack[i][0] == key:
                event = stack[i][1]
                del stack[i:]
                event.end = now
                return event
        return None

    def _stack(self) -> list[tuple[object, Event]]:
        try:
            return self._open_events.stack
        except AttributeError:
            self._open_events.stack = []
            return self._open_events.stack
