"""Collect what runs on global tensors: ops, layouts, and bytes of redistributions (``report``)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mirrored.transports.default import current

from ..autograd import backward
from ..boxing.plan import plan, plan_bytes
from ..boxing.steps import Step
from ..compiled import watching
from ..dispatch.plans import plan as plans
from ..drawing.files import write
from ..movement import check_mode
from ..movement.between_hosts import bytes_between
from ..spec import TensorSpec
from ..spec.tracer import Tracer
from .advice import Advice, advise
from .difference import Difference, difference
from .lines import Line, sbps
from .page import page
from .text import busiest, summary, table
from .timeline import Timeline
from .trace import trace_text


class Report:
    """What ran inside ``report()``: a line for each op and call site, in the order first met.

    Bytes are those that the busiest rank sends; for a compiled step, those that this rank sends.
    ``between`` is the number of bytes that all ranks together send from host to host, computed from
    the plans of boxings; it excludes compiled steps and GPUs. ``rows_of_experts`` holds the number
    of rows that each rank got for its experts, where the tokens of a mixture of experts are sent to
    the ranks of their experts. ``by_messages`` is the number of bytes that this rank sent, by any
    operation, to ranks with which it shares no memory, such as ranks on other hosts.

    ``print(r)`` shows a table, ``r.save("report.html")`` writes a page. ``r.timeline`` holds the
    times of ``report(timeline=True)``; otherwise it is None.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self.by_messages = 0
        self.rows_of_experts: Counter[int] = Counter()
        self._lines: dict[tuple[str, str], Line] = {}
        self._advice: dict[tuple[str, str, str], Advice | None] = {}
        self._thread = threading.local()

    @property
    def lines(self) -> list[Line]:
        """All lines, in the order first met."""
        return list(self._lines.values())

    @property
    def nbytes(self) -> int:
        """The bytes that all redistributions (boxings) sent from the busiest rank."""
        return sum(line.nbytes for line in self.lines)

    @property
    def between(self) -> int:
        """The bytes that all ranks together sent from host to host in redistributions (boxings)."""
        return sum(line.between for line in self.lines)

    @property
    def whole(self) -> list[str]:
        """The names of the ops that no rule fits, which ran on gathered (replicated) inputs."""
        return sorted({line.op for line in self.lines if line.whole})

    @property
    def advice(self) -> list[Advice]:
        """Advice on redistributions (boxings) that could be avoided, largest first.

        Each advice considers one op alone: it does not know where the operands come from, nor where
        else they are used.
        """
        advices = [advice for advice in self._advice.values() if advice is not None]
        return sorted(advices, key=lambda each: -self._lines[each.op, each.site].nbytes)

    def count(self, op: str) -> int:
        """Return how often ``op`` ran."""
        return sum(line.count for line in self.lines if line.op == op)

    def boxings(self) -> Counter[str]:
        """Return how often each redistribution (boxing) ran, by its moves as text."""
        return sum((line.boxings for line in self.lines), Counter())

    def bytes_by_op(self) -> dict[str, int]:
        """Return op -> bytes of its redistributions (boxings), largest first, without zeros."""
        nbytes_by_op: Counter[str] = Counter()
        for line in self.lines:
            nbytes_by_op[line.op] += line.nbytes
        return {op: nbytes for op, nbytes in nbytes_by_op.most_common() if nbytes}

    # -- callbacks of the tracer -------------------------------------------------------------------

    def _line(self, op: str, site: str) -> Line:
        return self._lines.setdefault((op, site), Line(op, site))

    def _on_op_begin(self, plan: plans.Plan) -> None:
        """Note that an op begins, so that boxings that run inside it count for this op.

        When the op ends, ``_on_op_end`` restores the name of its caller.
        """
        self._running_plans().append((plan, check_mode.current_op()))
        check_mode.set_current_op(plan.name)

    def _on_op_end(
        self,
        plan: plans.Plan,
        _: Any,
        __: Any,
        ins: Sequence[TensorSpec],
        outs: Sequence[TensorSpec],
    ) -> None:
        running = self._running_plans()
        while running:  # plans above this one on the stack were ended by an error
            started, caller = running.pop()
            if started is plan:
                check_mode.set_current_op(caller)
                break
        site = check_mode.call_site()
        line = self._line(plan.name, site)
        line.count += 1
        # An op whose inputs are all B anyway loses nothing by running on replicated inputs.
        has_sharded_input = any(any(not e.is_broadcast for e in spec.sbp) for spec in ins)
        line.whole = line.whole or (plan.is_whole and has_sharded_input)
        # An op that returns an operand itself, such as contiguous() of a contiguous tensor, has no
        # outs.
        line.layouts[f"{sbps(ins)} -> {sbps(outs)}" if outs else sbps(ins)] += 1
        key = plan.name, site, sbps(ins)
        if key not in self._advice:
            self._advice[key] = advise(plan, ins, site)

    def _running_plans(self) -> list[tuple[plans.Plan, str]]:
        """Return this thread's stack of running plans, as (plan, name of the op that called it)."""
        if not hasattr(self._thread, "calling"):
            self._thread.calling = []
        return self._thread.calling

    def _on_boxing_begin(self, src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...]) -> None:
        if not moves:
            return
        in_backward = backward.in_backward()
        line = self._line(
            "backward" if in_backward else check_mode.current_op(),
            "" if in_backward else check_mode.call_site(),
        )
        line.boxings[f"{', '.join(map(str, moves))}"] += 1
        line.nbytes += plan_bytes(moves)
        between, planned = bytes_between(src, moves, in_backward) or 0, plan_bytes(plan(src, dst))
        if between and planned and plan_bytes(moves) != planned:
            # bytes_between does not know that codecs and sparse tensors send fewer bytes, so its
            # result is scaled to the bytes that are sent.
            between = round(between * plan_bytes(moves) / planned)
        line.between += between

    def _on_routed(self, ranks: Sequence[int], rows: Sequence[int]) -> None:
        self.rows_of_experts.update(dict(zip(ranks, rows, strict=True)))

    def _on_compiled(self, what: watching.ProgramEvent, begins: bool) -> None:
        """Note an event of a compiled step: its call, or a message at one of its lines."""
        if not begins or what.kind not in ("step", "message", "start"):
            return
        is_call = what.kind == "step"
        line = self._line(what.step, check_mode.call_site() if is_call else what.where)
        line.compiled = True
        if is_call:
            line.count += 1
        else:
            line.boxings[what.name] += 1
            line.nbytes += what.sent

    # -- showing it --------------------------------------------------------------------------------

    def summary(self) -> str:
        """Return a sentence or two on what ran and what it sent."""
        return summary(self.lines, self.timeline, self.by_messages, busiest(self.rows_of_experts))

    def __str__(self) -> str:
        return table(self.lines, self.advice, self.by_messages, busiest(self.rows_of_experts))

    def html(self) -> str:
        """Return the report as a self-contained HTML page."""
        return page(self.lines, self.advice, self.timeline, self.summary())

    def save(self, path: str | Path) -> Path:
        """Write the report as an HTML page to ``path``; missing folders are created."""
        return write(path, self.html())

    def save_trace(self, path: str | Path) -> Path:
        """Write the times of this rank as a file that ui.perfetto.dev and chrome://tracing open.

        Raises:
            ValueError: the report has no timeline.
        """
        if self.timeline is None:
            raise ValueError(
                "save_trace: this report took no times, so that what it watched was not slowed "
                "down.\n  Ask for them: consistent.report(timeline=True)."
            )
        return write(path, trace_text(self.timeline))

    def diff(self, other: Report) -> Difference:
        """Return what changed from this report to ``other``, by op and call site.

        The result can be printed or saved as a page.

        Raises:
            TypeError: ``other`` is not a report.
        """
        if not isinstance(other, Report):
            raise TypeError(
                f"diff: other is of type {type(other).__name__}, and a report is compared with a "
                "report. Write before.diff(after), both made by consistent.report()."
            )
        return difference(self.lines, other.lines)


@contextmanager
def report(timeline: bool = False) -> Iterator[Report]:
    """Collect what runs on global tensors inside ``with report() as r:``.

    Then ``print(r)`` shows it, and ``r.save("report.html")`` writes a page. Nothing is
    communicated: the report is this rank's view, which is the same on every rank. Inside the block,
    ops take a few microseconds longer; outside there is no cost.

    Args:
        timeline: also take times, for the page and ``r.save_trace``. They are the times of this
            rank.
    """
    new_report = Report(Timeline() if timeline else None)
    with ExitStack() as stack:
        stack.enter_context(
            Tracer(
                on_op_begin=new_report._on_op_begin,
                on_op_end=new_report._on_op_end,
                on_boxing_begin=new_report._on_boxing_begin,
                on_compiled=new_report._on_compiled,
                on_routed=new_report._on_routed,
            ).tracing()
        )
        if new_report.timeline is not None:
            # Entered last, so that its times exclude the report's work.
            stack.enter_context(new_report.timeline.recording())
        bytes_before = current().bytes_by_messages()
        yield new_report
        new_report.by_messages = current().bytes_by_messages() - bytes_before
