"""Listing of a program: a row for each op with its text, layout, bytes and line of the step, for
``show()`` and reports."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch.fx import Node

from ..drawing.words import layout_text, sbp_text, short_site
from ..spec.nested import map_each
from .opaque import (
    DRAWN,
    ORDERED,
    SENDING,
    START,
    START_MESSAGE,
    WAIT,
    WAIT_MESSAGE,
)

Program = Segment = Any  # defined in program.py, which imports this file

_WORDS = {
    DRAWN: "random",
    START: "start",
    START_MESSAGE: "start",
    WAIT: "wait for",
    WAIT_MESSAGE: "wait for",
}


@dataclass(slots=True)
class ListingRow:
    """One row of a program listing, as ``show()`` prints it.

    Args:
        kind: "read", "item", "op", "random", "message", "start" or "wait for" (of a message that
            runs concurrently with the ops), "put", or "graph break".
        text: what the row does, such as ``%4 = mm(%2, %3)``.
        layout: dtype, sizes and SBP of the result.
        where: ``file:line in function`` of the step; "" if no line of the step does it.
        sent: bytes that this rank sends; None if the row is no message.
        held: bytes of the result on this rank.
        boxing: (SBPs before, SBPs after) as text, if the message changes the layout of a global
            tensor.
        name: name of the op or message alone.
        again: whether the row computes an earlier op again (rematerialization), instead of holding
            its result.
    """

    kind: str
    text: str
    layout: str = ""
    where: str = ""
    sent: int | None = None
    held: int = 0
    boxing: tuple[str, str] | None = None
    name: str = ""
    again: bool = False

    @property
    def at(self) -> str:
        """The line of the step as ``train.py:12``; for a recomputed op, ``train.py:12, again``."""
        return short_site(self.where) + (", again" if self.again else "")

    @property
    def move(self) -> str:
        """The change of layout that a message makes, such as ``P -all_reduce-> B``.

        If the layouts are unknown, the name of the message.
        """
        name = f"{self.kind} {self.name}" if self.kind == "wait for" else self.name
        return name if self.boxing is None else f"{self.boxing[0]} -{name}-> {self.boxing[1]}"


def rows(program: Program) -> Iterator[ListingRow]:
    """Yield the rows of the whole program, in the order in which it runs."""
    # Values inside segments are numbered after those that segments pass on.
    fresh = count(program.count)
    for part in program.segments:
        yield from _rows(program, part, fresh)


def _rows(program: Program, part: Segment, fresh: Iterator[int]) -> Iterator[ListingRow]:
    nodes = part.graph.graph.nodes
    names: dict[Node, str] = {}
    inputs = (node for node in nodes if node.op == "placeholder")
    for node, number in zip(inputs, part.inputs, strict=True):
        names[node] = f"%{number}"
    for number, read in part.reads:
        text = f"%{number} = {_read_text(read)}"
        yield _read(text, read.x)
    numbers = iter(part.outputs)
    returned: Any = next(n for n in nodes if n.op == "output").args[0]
    outs = {node: f"%{next(numbers)}" for node in returned}
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_item(node):  # %3[0]
            whole, i = node.args
            names[node] = names[whole] if len(whole.users) == 1 else f"{names[whole]}[{i}]"
            if node in outs:
                yield ListingRow("item", f"{outs[node]} = {names[node]}", _layout(node))
            continue
        names[node] = outs.get(node) or f"%{next(fresh)}"
        yield row(program, node, names)
    for write in part.writes:
        value = "None" if write.value is None else f"%{write.value.value}"
        yield ListingRow("put", f"put {value} into {write.source.path}")
    if part.graph_break is not None:
        yield ListingRow("graph break", f"call {part.text} as it is written", name=part.text)


def row(program: Program, node: Node, names: dict[Node, str]) -> ListingRow:
    """Return the row of one op or message of a segment's graph.

    Args:
        names: names of the nodes that are shown before, such as ``%4``; others are shown by their
            fx name.
    """
    made = _row(program, node, names)
    made.again = bool(node.meta.get("again"))
    return made


def _row(program: Program, node: Node, names: dict[Node, str]) -> ListingRow:
    where, mine = node.meta.get("where", ""), names.get(node, f"%{node.name}")
    if node.op == "get_attr":
        return ListingRow("op", f"{mine} = constant {node.target}", where=where, name="constant")
    if node.target in ORDERED or node.target is DRAWN:
        call = program.calls[node.args[2 if node.target is DRAWN else 1]]  # type: ignore[index]
        kind = call.kind or call.text.split(" ")[0]
        word = _WORDS.get(node.target, "message")  # type: ignore[arg-type]
        given = _shown(node.args[:1], names)
        results = list(node.users)
        layout, boxing = "".join(_layout(user) for user in results[:1]), node.meta.get("boxing")
        if boxing is not None:
            source, target = boxing
            if not layout:  # a reduction in place, or a message without readers in this segment
                x = node.args[0]
                layout = (
                    f"{_layout(x)} {sbp_text(target)}"
                    if isinstance(x, Node)
                    else layout_text(target, target.dtype, target.shape)
                )
            layout = f"{layout} from {sbp_text(source)}"
        return ListingRow(
            word,
            f"{mine} = {word} {kind}({given})",
            layout,
            where,
            call.bytes if node.target in SENDING else None,
            sum(map(_held, results)),
            None if boxing is None else (sbp_text(boxing[0]), sbp_text(boxing[1])),
            kind,
        )
    name = str(node.target).removeprefix("aten.").rpartition(".")[0]
    shown = [_shown([x], names) for x in node.args]
    shown += [f"{k}={_shown([x], names)}" for k, x in node.kwargs.items()]
    text = f"{mine} = {name}({', '.join(shown)})"
    results = [node] if "shape" in node.meta else [user for user in node.users if is_item(user)]
    layout = "".join(map(_layout, results[:1]))
    return ListingRow("op", text, layout, where, held=sum(map(_held, results)), name=name)


def _read_text(read: Any) -> str:
    if read.kind == "source":
        return f"read {read.at.path}"
    if read.kind == "argument":
        return f"argument {read.at}"
    return "read the learning rate" if read.kind == "rate" else "read seed and count of draws"


def is_item(node: Node) -> bool:
    """Return whether the node only takes one result of another node."""
    return node.target is operator.getitem


def _shown(args: Any, names: dict[Node, str]) -> str:
    shown = [map_each(_listed(x), Node, lambda n: _Name(names.get(n, f"%{n.name}"))) for x in args]
    return ", ".join(map(repr, shown))


def _listed(x: Any) -> Any:
    return [_listed(y) for y in x] if isinstance(x, list | tuple) else x


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _layout(node: Node) -> str:
    spec = node.meta.get("spec")
    if spec is not None:
        return layout_text(spec, spec.dtype, spec.shape)
    return layout_text(None, node.meta["dtype"], node.meta["shape"]) if "shape" in node.meta else ""


def _held(node: Node) -> int:
    if "shape" not in node.meta:
        return 0
    return math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize


def _read(text: str, x: Any) -> ListingRow:
    """Return the row of a value that a segment reads before its ops run, such as a parameter.

    Args:
        text: text of the row.
        x: an ``InputLike`` that describes the value, the tensor of a learning rate, or None for the
            seed of random ops.
    """
    if x is None:
        return ListingRow("read", text)
    held = x.bytes if hasattr(x, "bytes") else x.nbytes
    return ListingRow(
        "read", text, layout_text(getattr(x, "spec", None), x.dtype, x.shape), held=held
    )
