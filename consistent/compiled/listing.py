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
from ..spec.nested import map_instances
from .opaque import (
    DRAWN,
    ORDERED_OPS,
    SENDING_OPS,
    START_MESSAGE,
    START_REDUCE,
    WAIT_MESSAGE,
    WAIT_REDUCE,
)

Program = Segment = Any  # defined in program.py, which imports this file

_ROW_KINDS = {
    DRAWN: "random",
    START_REDUCE: "start",
    START_MESSAGE: "start",
    WAIT_REDUCE: "wait for",
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
        name: only the name of the op or message.
        is_recomputed: whether the row computes an earlier op again (rematerialization), instead of
            holding its result.
    """

    kind: str
    text: str
    layout: str = ""
    where: str = ""
    sent: int | None = None
    held: int = 0
    boxing: tuple[str, str] | None = None
    name: str = ""
    is_recomputed: bool = False

    @property
    def location(self) -> str:
        """The line of the step as ``train.py:12``; for a recomputed op, ``train.py:12, again``."""
        return short_site(self.where) + (", again" if self.is_recomputed else "")

    @property
    def boxing_text(self) -> str:
        """The change of layout that a message makes, such as ``P -all_reduce-> B``.

        If the layouts are unknown, the name of the message.
        """
        name = f"{self.kind} {self.name}" if self.kind == "wait for" else self.name
        return name if self.boxing is None else f"{self.boxing[0]} -{name}-> {self.boxing[1]}"


def rows(program: Program) -> Iterator[ListingRow]:
    """Yield the rows of the whole program, in the order in which it runs."""
    # Values inside segments are numbered after those that segments pass on.
    new_numbers = count(program.count)
    for part in program.segments:
        yield from _segment_rows(program, part, new_numbers)


def _segment_rows(
    program: Program, part: Segment, new_numbers: Iterator[int]
) -> Iterator[ListingRow]:
    nodes = part.graph.graph.nodes
    names: dict[Node, str] = {}
    inputs = (node for node in nodes if node.op == "placeholder")
    for node, number in zip(inputs, part.inputs, strict=True):
        names[node] = f"%{number}"
    for number, read in part.reads:
        text = f"%{number} = {_read_text(read)}"
        yield _read_row(text, read.x)
    numbers = iter(part.outputs)
    returned: Any = next(n for n in nodes if n.op == "output").args[0]
    outs = {node: f"%{next(numbers)}" for node in returned}
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_item(node):  # %3[0]
            source, i = node.args
            names[node] = names[source] if len(source.users) == 1 else f"{names[source]}[{i}]"
            if node in outs:
                yield ListingRow("item", f"{outs[node]} = {names[node]}", _layout_of(node))
            continue
        names[node] = outs.get(node) or f"%{next(new_numbers)}"
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
    result = _node_row(program, node, names)
    result.is_recomputed = bool(node.meta.get("again"))
    return result


def _node_row(program: Program, node: Node, names: dict[Node, str]) -> ListingRow:
    where, label = node.meta.get("where", ""), names.get(node, f"%{node.name}")
    if node.op == "get_attr":
        return ListingRow("op", f"{label} = constant {node.target}", where=where, name="constant")
    if node.target in ORDERED_OPS or node.target is DRAWN:
        call = program.calls[node.args[2 if node.target is DRAWN else 1]]  # type: ignore[index]
        kind = call.kind or call.text.split(" ")[0]
        row_kind = _ROW_KINDS.get(node.target, "message")  # type: ignore[arg-type]
        inputs_text = _args_text(node.args[:1], names)
        results = list(node.users)
        layout, boxing = "".join(_layout_of(user) for user in results[:1]), node.meta.get("boxing")
        if boxing is not None:
            source, target = boxing
            if not layout:  # a reduction in place, or a message without readers in this segment
                x = node.args[0]
                layout = (
                    f"{_layout_of(x)} {sbp_text(target)}"
                    if isinstance(x, Node)
                    else layout_text(target, target.dtype, target.shape)
                )
            layout = f"{layout} from {sbp_text(source)}"
        return ListingRow(
            row_kind,
            f"{label} = {row_kind} {kind}({inputs_text})",
            layout,
            where,
            call.bytes if node.target in SENDING_OPS else None,
            sum(map(_result_bytes, results)),
            None if boxing is None else (sbp_text(boxing[0]), sbp_text(boxing[1])),
            kind,
        )
    name = str(node.target).removeprefix("aten.").rpartition(".")[0]
    arg_texts = [_args_text([x], names) for x in node.args]
    arg_texts += [f"{k}={_args_text([x], names)}" for k, x in node.kwargs.items()]
    text = f"{label} = {name}({', '.join(arg_texts)})"
    results = [node] if "shape" in node.meta else [user for user in node.users if is_item(user)]
    layout = "".join(map(_layout_of, results[:1]))
    return ListingRow("op", text, layout, where, held=sum(map(_result_bytes, results)), name=name)


def _read_text(read: Any) -> str:
    if read.kind == "source":
        return f"read {read.at.path}"
    if read.kind == "argument":
        return f"argument {read.at}"
    return "read the learning rate" if read.kind == "rate" else "read seed and count of draws"


def is_item(node: Node) -> bool:
    """Return whether the node only takes one result of another node."""
    return node.target is operator.getitem


def _args_text(args: Any, names: dict[Node, str]) -> str:
    values = [
        map_instances(_tuples_to_lists(x), Node, lambda n: _UnquotedStr(names.get(n, f"%{n.name}")))
        for x in args
    ]
    return ", ".join(map(repr, values))


def _tuples_to_lists(x: Any) -> Any:
    return [_tuples_to_lists(y) for y in x] if isinstance(x, list | tuple) else x


class _UnquotedStr(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _layout_of(node: Node) -> str:
    spec = node.meta.get("spec")
    if spec is not None:
        return layout_text(spec, spec.dtype, spec.shape)
    return layout_text(None, node.meta["dtype"], node.meta["shape"]) if "shape" in node.meta else ""


def _result_bytes(node: Node) -> int:
    if "shape" not in node.meta:
        return 0
    return math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize


def _read_row(text: str, x: Any) -> ListingRow:
    """Return the row of a value that a segment reads before its ops run, such as a parameter.

    Args:
        text: text of the row.
        x: an ``InputLike`` that describes the value, the tensor of a learning rate, or None for the
            seed of random ops.
    """
    if x is None:
        return ListingRow("read", text)
    nbytes = x.bytes if hasattr(x, "bytes") else x.nbytes
    return ListingRow(
        "read", text, layout_text(getattr(x, "spec", None), x.dtype, x.shape), held=nbytes
    )
