"""Conversion of a recorded graph to a program: the graph is split into segments at its graph
breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from ..spec.nested import each_in, map_each
from .node_place import NodePlace, Writes
from .opaque import OpaqueCall
from .parts import part_of
from .passes import Trace
from .program import GRAPH_BREAK, Place, Program, Read, Segment, Write
from .recorder import Recorder


def trace_of(
    recorder: Recorder, writes: Writes, result: Any, calls: dict[int, OpaqueCall]
) -> Trace:
    """Return the recorded graph as a ``Trace``, on which the optimization passes work.

    ``writes`` are the assignments at the end of the step, and ``result`` is what it returns.
    """
    ends = _ends(recorder, writes)
    lasting = {node for end in ends for node in _nodes_of(end)} | set(_nodes_in(result))
    return Trace(recorder.recorded.graph, calls, lasting)


def cut(
    name: str,
    recorder: Recorder,
    trace: Trace,
    writes: Writes,
    result: Any,
    backend: Callable[..., Any],
) -> Program:
    """Return the graph in ``trace``, after all passes, as a program, split at its graph breaks.

    Args:
        name: name of the step.
        writes: assignments at the end of the step.
        result: what the step returns, with a ``NodePlace`` for each tensor.
        backend: function with which the program compiles its segments.
    """

    def settled(place: NodePlace) -> NodePlace:
        node = place.node
        return place if node is None else replace(place, node=trace.replaced.get(node, node))

    ends: list[Writes] = [
        [(source, None if place is None else settled(place)) for source, place in each]
        for each in _ends(recorder, writes)
    ]
    result = map_each(result, NodePlace, settled)
    pieces, breaks = _pieces(recorder.recorded.graph)
    needed = _needed_after(pieces, ends, result)
    cutting = _Cutting(recorder)
    for i, graph_break in enumerate([*breaks, None]):
        ending = _nodes_of(ends[i]) + ([] if graph_break else _nodes_in(result))
        cutting.add(pieces[i], ends[i], ending, needed[i], graph_break)
    shown = map_each(result, NodePlace, cutting.place)
    count = len(cutting.numbers)
    return Program(
        name, cutting.segments, shown, trace.calls, count, backend, trace.saved, trace.notes
    )


class _Cutting:
    """Builder of a program's segments, which numbers the values that they pass to each other."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._read: set[Node] = set()
        self.numbers: dict[Node, int] = {}
        self.segments: list[Segment] = []

    def add(
        self, piece: list[Node], end: Writes, ending: list[Node], later: set[Node], graph_break: Any
    ) -> None:
        """Add the segment that ends at the node ``graph_break``; if it is None, the last segment.

        Args:
            piece: nodes of the segment.
            end: assignments, such as to ``param.grad``, that are made after the segment.
            ending: nodes whose values ``end`` assigns, or, in the last segment, the step returns.
            later: nodes whose values later segments read.
        """
        recorder, inside = self._recorder, set(piece)
        given = list(
            dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in inside)
        )
        passed_on = later.union(ending)
        own = [n for n in piece if n in passed_on]
        graph = part_of(piece, given, own, recorder.recorded.constants)
        reads: list[tuple[int, Read]] = []
        for n in dict.fromkeys([*given, *ending]):
            # A value is read once, before the first segment that needs it.
            if n.op == "placeholder" and n not in self._read:
                self._read.add(n)
                reads.append((self._number(n), recorder.recorded.reads[n].recorded()))
        self.segments.append(
            Segment(
                graph,
                [self._number(n) for n in given],
                [self._number(n) for n in own],
                reads,
                [Write(source, None if p is None else self.place(p)) for source, p in end],
                recorder.drawn() if graph_break is None else graph_break.meta["draws"],
                None if graph_break is None else recorder.objects[graph_break.args[0]],
                "" if graph_break is None else graph_break.meta["text"],
            )
        )

    def place(self, place: NodePlace) -> Place:
        """Return ``place`` as a ``Place``, with the number of its value instead of the fx node."""
        at = None if place.node is None else self._number(place.node)
        return Place(at, place.spec, place.argument, place.source)

    def _number(self, node: Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))


def _pieces(graph: Graph) -> tuple[list[list[Node]], list[Node]]:
    """Split a graph at its graph breaks: return (lists of the nodes between them, the breaks).

    Placeholders are in none of the lists.
    """
    pieces: list[list[Node]] = [[]]
    breaks: list[Node] = []
    for node in graph.nodes:
        if node.target is GRAPH_BREAK:
            breaks.append(node)
            pieces.append([])
        elif node.op != "placeholder":
            pieces[-1].append(node)
    return pieces, breaks


def _needed_after(pieces: list[list[Node]], ends: list[Writes], result: Any) -> list[set[Node]]:
    """Return, for each piece of a graph, the nodes whose values are read after that piece.

    Readers are ops of later pieces, the assignments ``ends`` at the ends of later pieces, and the
    ``result`` of the step.
    """
    needed, found = set(_nodes_in(result)), []
    # Backwards, so that ``needed`` holds what all later pieces read.
    for piece, end in zip(reversed(pieces), reversed(ends), strict=True):
        found.append(set(needed))
        needed.update(n for node in piece for n in node.all_input_nodes)
        needed.update(_nodes_of(end))
    return found[::-1]


def _ends(recorder: Recorder, writes: Writes) -> list[Writes]:
    """Return the assignments at the end of each segment; ``writes`` are those of the last one."""
    return [
        *(n.meta["writes"] for n in recorder.recorded.graph.nodes if n.target is GRAPH_BREAK),
        writes,
    ]


def _nodes_of(end: Writes) -> list[Node]:
    return [p.node for _, p in end if p is not None and p.node is not None]


def _nodes_in(result: Any) -> list[Node]:
    return [p.node for p in each_in(result, NodePlace) if p.node is not None]
