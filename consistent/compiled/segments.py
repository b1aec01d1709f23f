"""Cutting what was recorded at its live lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from ..nn.nested import each_in, map_each
from ..spec.bytes_text import bytes_text
from .bounded import Bound
from .fusing import Fusing
from .opaque import Call
from .parts import part_of
from .passes import Trace
from .passes.overlap import overlap
from .passes.peak import Count, remove_dead
from .program import LIVE, Place, Program, Segment, Source, Write
from .recorder import NodePlace, Recorder, Writes


def cut(
    name: str,
    recorder: Recorder,
    writes: Writes,
    result: Any,
    calls: dict[int, Call],
    backend: Callable[..., Any],
    passes: Sequence[Callable[[Trace], None]],
    bound: Bound | None = None,
    fusing: Fusing | None = None,
    beside: bool = False,
) -> Program:
    """The program of what ``recorder`` noted, which ends with ``writes`` and gives ``result``."""
    lasting = [p.node for end in _ends(recorder, writes) for _, p in end if p and p.node]
    lasting += [p.node for p in each_in(result, NodePlace) if p.node]
    trace = Trace(recorder.graph, calls, set(lasting))
    if bound is not None:
        bound.begin(trace)
    for run in passes:
        run(trace)
    if bound is not None:
        bound.end(trace)
    if fusing is not None:
        fusing.run(trace)
    if beside:
        beside_ops(trace, None if bound is None else bound.bytes)
    pieces: list[list[Node]] = [[]]
    lives: list[Node] = []
    for node in recorder.graph.nodes:
        if node.target is LIVE:
            lives.append(node)
            pieces.append([])
        elif node.op != "placeholder":
            pieces[-1].append(node)

    def settled(place: NodePlace) -> NodePlace:
        node = place.node
        return place if node is None else replace(place, node=trace.replaced.get(node, node))

    ended = [
        [(slot, None if place is None else settled(place)) for slot, place in each]
        for each in _ends(recorder, writes)
    ]
    result = map_each(result, NodePlace, settled)
    numbers: dict[Node, int] = {}

    def number(node: Node) -> int:
        return numbers.setdefault(node, len(numbers))

    def numbered(place: NodePlace) -> Place:
        at = None if place.node is None else number(place.node)
        return Place(at, place.spec, place.argument, place.slot)

    segments: list[Segment] = []
    read: set[Node] = set()
    for i, piece in enumerate(pieces):
        ending = [p.node for _, p in ended[i] if p is not None and p.node is not None]
        if i == len(pieces) - 1:
            ending += [p.node for p in each_in(result, NodePlace) if p.node is not None]
        later = {n for other in pieces[i + 1 :] for node in other for n in node.all_input_nodes}
        later.update(p.node for end in ended[i + 1 :] for _, p in end if p and p.node is not None)
        later.update(p.node for p in each_in(result, NodePlace) if p.node is not None)
        inside = set(piece)
        given = list(
            dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in inside)
        )
        own = [n for n in piece if n in later or n in ending]
        graph = part_of(piece, given, own, recorder.constants)
        reads: list[tuple[int, Source]] = []
        for n in dict.fromkeys([*given, *ending]):
            if n.op == "placeholder" and n not in read:
                read.add(n)
                reads.append((number(n), recorder.sources[n].recorded()))
        live = lives[i] if i < len(lives) else None
        segments.append(
            Segment(
                graph,
                [number(n) for n in given],
                [number(n) for n in own],
                reads,
                [Write(slot, None if p is None else numbered(p)) for slot, p in ended[i]],
                recorder.drawn() if live is None else live.meta["draws"],
                None if live is None else recorder.objects[live.args[0]],  # type: ignore[index]
                "" if live is None else live.meta["text"],
            )
        )
    shown = map_each(result, NodePlace, numbered)
    return Program(name, segments, shown, calls, len(numbers), backend, trace.saved, trace.notes)


def beside_ops(trace: Trace, most: int | None) -> None:
    """Let messages run beside ops, where no more than ``most`` bytes are held."""
    remove_dead(trace)
    before = Count(trace).bytes
    moved = overlap(trace, None if most is None else max(most, before))
    after = Count(trace).bytes
    trace.notes.append(
        f"overlap: {moved} messages run beside ops; {bytes_text(after)} held at a time, "
        f"{bytes_text(before)} before"
    )


def _ends(recorder: Recorder, writes: Writes) -> list[Writes]:
    """What is put into places at the end of each segment."""
    return [*(n.meta["writes"] for n in recorder.graph.nodes if n.target is LIVE), writes]
