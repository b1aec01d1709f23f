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
from .opaque import ORDERED

Program = Segment = Any  # defined in program.py, which imports this file


@dataclass(frozen=True, eq=False, slots=True)
class Happening:
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
class Pieces:
    """Events of one segment, in the order ops, message, ops, ..., message, ops.

    Args:
        ops: the ops before each message, and those after the last; None where there are none.
        messages: the messages, with starts and waits, in order.
        at: ``OpaqueCall.number`` -> indices in ``messages``. Equal messages have the same number.
    """

    ops: list[Happening | None] = field(default_factory=list)
    messages: list[Happening] = field(default_factory=list)
    at: dict[int, list[int]] = field(default_factory=dict)


class Watching:
    """Context in which a program runs while a tracer listens; it reports the events of one run."""

    def __init__(self, program: Program) -> None:
        self._program = program
        if program.pieces is None:
            program.pieces = [_pieces(program, part) for part in program.segments]
        self._whole = Happening("step", program.name, program.name)
        self._now: Happening | None = None
        self._all: list[Pieces] = program.pieces
        self._pieces, self._met = Pieces(), Counter[int]()

    def __enter__(self) -> Watching:
        _tell(self._whole, True)
        return self

    def __exit__(self, *_: Any) -> None:
        _tell(self._whole, False)

    def segment(self, number: int, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run segment ``number`` as ``run(*inputs)``, report its ops, and return its result."""
        self._pieces, self._met = self._all[number], Counter()
        self._begin(self._pieces.ops[0])
        try:
            return run(*inputs)
        finally:
            self._end()

    @contextmanager
    def ordered(self, number: int) -> Iterator[None]:
        """Report to tracers the message that the block sends or waits for, by its call number.

        The event of the ops before it ends when the block begins; that of the ops after it begins
        at the end of the block.
        """
        # Equal messages share a number, so the count of those met so far tells which one this is.
        at = self._pieces.at[number][self._met[number]]
        self._met[number] += 1
        what = self._pieces.messages[at]
        self._end()
        _tell(what, True)
        try:
            yield
        finally:
            if what.kind != "start":
                _tell(what, False)
            self._begin(self._pieces.ops[at + 1])

    def graph_break(self, part: Segment) -> None:
        """Run the call at the graph break after segment ``part``, and report it to tracers."""
        assert part.graph_break is not None
        what = Happening("graph break", self._program.name, part.text)
        _tell(what, True)
        try:
            part.graph_break()
        finally:
            _tell(what, False)

    def _begin(self, what: Happening | None) -> None:
        self._now = what
        if what is not None:
            _tell(what, True)

    def _end(self) -> None:
        if self._now is not None:
            _tell(self._now, False)
            self._now = None


def _tell(what: Happening, begins: bool) -> None:
    for notify in list(_ON_COMPILED):
        notify(what, begins)


def _pieces(program: Program, part: Segment) -> Pieces:
    made, ops = Pieces(), []
    for node in part.graph.graph.nodes:
        if node.target in ORDERED:
            made.ops.append(_ops(program, ops))
            made.at.setdefault(node.args[1], []).append(len(made.messages))
            made.messages.append(_message(program, node))
            ops = []
        elif node.op == "call_function" and not is_item(node) and not _is_view(node):
            ops.append(node)
    made.ops.append(_ops(program, ops))
    return made


def _ops(program: Program, nodes: list[Node]) -> Happening | None:
    if not nodes:
        return None
    found = [row(program, node, {}) for node in nodes]
    names = Counter(each.name for each in found)
    most = ", ".join(times(name, n) for name, n in names.most_common(3))
    more = f" and {len(names) - 3} other kinds" if len(names) > 3 else ""
    name = f"{len(nodes)} ops: {most}{more}" if len(nodes) > 1 else most
    first, last = (site_of(found[i].where) for i in (0, -1))
    detail = f"to {short_site(last)}" if last != first else ""
    return Happening("ops", program.name, name, first, detail)


def _message(program: Program, node: Node) -> Happening:
    made = row(program, node, {})
    return Happening(
        made.kind, program.name, made.move, site_of(made.where), made.layout, made.sent or 0
    )


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
