"""Conversion of a recorded graph to a program: the graph is split into segments at its graph
breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from ..spec.nested import instances_in, map_instances
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
    writes_by_segment = _writes_by_segment(recorder, writes)
    lasting = {
        node for segment_writes in writes_by_segment for node in _assigned_nodes(segment_writes)
    } | set(_result_nodes(result))
    return Trace(recorder.recorded.graph, calls, lasting)


def build_program(
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

    def updated(place: NodePlace) -> NodePlace:
        node = place.node
        return place if node is None else replace(place, node=trace.replaced.get(node, node))

    writes_by_segment: list[Writes] = [
        [(source, None if place is None else updated(place)) for source, place in segment_writes]
        for segment_writes in _writes_by_segment(recorder, writes)
    ]
    result = map_instances(result, NodePlace, updated)
    pieces, breaks = _split_at_breaks(recorder.recorded.graph)
    read_later = _nodes_read_later(pieces, writes_by_segment, result)
    builder = _SegmentBuilder(recorder)
    for i, graph_break in enumerate([*breaks, None]):
        ending = _assigned_nodes(writes_by_segment[i]) + (
            [] if graph_break else _result_nodes(result)
        )
        builder.add(pieces[i], writes_by_segment[i], ending, read_later[i], graph_break)
    result_places = map_instances(result, NodePlace, builder.place)
    count = len(builder.numbers)
    return Program(
        name, builder.segments, result_places, trace.calls, count, backend, trace.saved, trace.notes
    )


class _SegmentBuilder:
    """Builder of a program's segments, which numbers the values that they pass to each other."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._placeholders_read: set[Node] = set()
        self.numbers: dict[Node, int] = {}
        self.segments: list[Segment] = []

    def add(
        self, piece: list[Node], writes: Writes, ends: list[Node], live: set[Node], graph_break: Any
    ) -> None:
        """Add the segment that ends at the node ``graph_break``; if it is None, the last segment.

        Args:
            piece: nodes of the segment.
            writes: assignments, such as to ``param.grad``, that are made after the segment.
            ends: nodes whose values ``writes`` assigns, or, in the last segment, the step returns.
            live: nodes whose values later segments read.
        """
        recorder, inside = self._recorder, set(piece)
        input_nodes = list(
            dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in inside)
        )
        passed_on = live.union(ends)
        output_nodes = [n for n in piece if n in passed_on]
        graph = part_of(piece, input_nodes, output_nodes, recorder.recorded.constants)
        reads: list[tuple[int, Read]] = []
        for n in dict.fromkeys([*input_nodes, *ends]):
            # A value is read once, before the first segment that needs it.
            if n.op == "placeholder" and n not in self._placeholders_read:
                self._placeholders_read.add(n)
                reads.append((self._number(n), recorder.recorded.reads[n].recorded()))
        self.segments.append(
            Segment(
                graph,
                [self._number(n) for n in input_nodes],
                [self._number(n) for n in output_nodes],
                reads,
                [Write(source, None if p is None else self.place(p)) for source, p in writes],
                recorder.draws_in_segment() if graph_break is None else graph_break.meta["draws"],
                None if graph_break is None else recorder.break_calls[graph_break.args[0]],
                "" if graph_break is None else graph_break.meta["text"],
            )
        )

    def place(self, place: NodePlace) -> Place:
        """Return ``place`` as a ``Place``, with the number of its value instead of the fx node."""
        number = None if place.node is None else self._number(place.node)
        return Place(number, place.spec, place.argument, place.source)

    def _number(self, node: Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))


def _split_at_breaks(graph: Graph) -> tuple[list[list[Node]], list[Node]]:
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


def _nodes_read_later(
    pieces: list[list[Node]], writes_by_segment: list[Writes], result: Any
) -> list[set[Node]]:
    """Return, for each piece of a graph, the nodes whose values are read after that piece.

    Readers are ops of later pieces, the assignments ``writes_by_segment`` at the ends of later
    pieces, and the ``result`` of the step.
    """
    needed, read_later = set(_result_nodes(result)), []
    # Backwards, so that ``needed`` holds what all later pieces read.
    for piece, segment_writes in zip(reversed(pieces), reversed(writes_by_segment), strict=True):
        read_later.append(set(needed))
        needed.update(n for node in piece for n in node.all_input_nodes)
        needed.update(_assigned_nodes(segment_writes))
    return read_later[::-1]


def _writes_by_segment(recorder: Recorder, writes: Writes) -> list[Writes]:
    """Return the assignments at the end of each segment; ``writes`` are those of the last one."""
    return [
        *(n.meta["writes"] for n in recorder.recorded.graph.nodes if n.target is GRAPH_BREAK),
        writes,
    ]


def _assigned_nodes(segment_writes: Writes) -> list[Node]:
    return [p.node for _, p in segment_writes if p is not None and p.node is not None]


def _result_nodes(result: Any) -> list[Node]:
    return [p.node for p in instances_in(result, NodePlace) if p.node is not None]
