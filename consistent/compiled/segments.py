"""Cutting what was recorded at its live lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..nn.nested import each_in, map_each
from .opaque import SENDING, Call
from .program import LIVE, Program, Segment, Source, Write
from .program import Place as Numbered
from .recorder import Place, Recorder, Writes


def cut(
    name: str,
    recorder: Recorder,
    writes: Writes,
    result: Any,
    calls: dict[int, Call],
    backend: Callable[..., Any],
) -> Program:
    """The program of what ``recorder`` noted, which ends with ``writes`` and gives ``result``."""
    pieces: list[list[Node]] = [[]]
    lives: list[Node] = []
    for node in recorder.graph.nodes:
        if node.target is LIVE:
            lives.append(node)
            pieces.append([])
        elif node.op != "placeholder":
            pieces[-1].append(node)
    ended = [*(live.meta["writes"] for live in lives), writes]
    numbers: dict[Node, int] = {}

    def number(node: Node) -> int:
        return numbers.setdefault(node, len(numbers))

    def numbered(place: Place) -> Numbered:
        at = None if place.node is None else number(place.node)
        return Numbered(at, place.spec, place.argument, place.slot)

    segments: list[Segment] = []
    made: set[Node] = set()
    read: set[Node] = set()
    for i, piece in enumerate(pieces):
        later = _used([n for other in pieces[i + 1 :] for n in other])
        later.update(p.node for end in ended[i:] for _, p in end if p is not None)
        later.update(p.node for p in each_in(result, Place))
        inside = set(piece)
        given = list(dict.fromkeys(n for n in _inputs(piece) if n not in inside))
        handed = [n for n in dict.fromkeys(later) if n is not None and n.op == "placeholder"]
        own = [n for n in piece if n in later]
        graph = _graph(piece, given, own, recorder.constants)
        reads: list[tuple[int, Source]] = []
        for n in [*given, *handed]:
            if n.op == "placeholder" and n not in read and (n in given or i == len(pieces) - 1):
                read.add(n)
                reads.append((number(n), recorder.sources[n]))
        made.update(own)
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
    shown = map_each(result, Place, numbered)
    return Program(name, segments, shown, calls, len(numbers), backend)


def _inputs(piece: list[Node]) -> list[Node]:
    return [n for node in piece for n in node.all_input_nodes]


def _used(nodes: list[Node]) -> dict[Node, None] | set[Node]:
    return {n for node in nodes for n in node.all_input_nodes}


def _graph(
    piece: list[Node], given: list[Node], own: list[Node], constants: dict[str, torch.Tensor]
) -> GraphModule:
    graph, copies = Graph(), {}
    for n in given:
        copies[n] = graph.placeholder(n.name)
    for n in piece:
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in own))
    graph.eliminate_dead_code(lambda n: n.target in SENDING or n.is_impure())
    used = {n.target for n in graph.nodes if n.op == "get_attr"}
    root = torch.nn.Module()
    for name in used:
        root.register_buffer(name, constants[name])
    return GraphModule(root, graph)
