"""A segment as stretches of ops that a device runs by itself, and what is run between them.

```
ops       mm, gelu, mm                 captured
call      message all_reduce           sends, or draws random numbers: by Python, so it is called
host      add (count of steps)         ops on the host, done before the ops of their stretch
ops       add, layer_norm, ...         captured
```

The host's ops of a stretch read nothing that its device's ops make. They come first unless they
write what one of these has read, or a value has to be brought from the device: there the stretch
ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..listing import is_item
from ..opaque import DRAWN, ORDERED


@dataclass
class Step:
    """Nodes that run together: "ops" of the device, "host" ops, or one "call" with its items."""

    kind: str
    nodes: list[Node] = field(default_factory=list)


def cut(graph: GraphModule, device: str) -> list[Step]:
    """The steps of a segment, in order. ``device`` is the type of the one that captures."""
    return _Cutting(graph, device).steps()


class _Cutting:
    def __init__(self, graph: GraphModule, device: str) -> None:
        self._graph, self._device = graph, device
        self._steps: list[Step] = []
        self._host, self._ops = Step("host"), Step("ops")

    def steps(self) -> list[Step]:
        for node in self._graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if is_item(node):
                self._step_of(node.all_input_nodes[0]).nodes.append(node)
            elif _is_call(node):
                self._end()
                self._steps.append(Step("call", [node]))
            elif self._is_captured(node):
                self._ops.nodes.append(node)
            else:
                made = set(self._ops.nodes)
                if made.intersection(node.all_input_nodes) or self._is_read(node):
                    self._end()
                self._host.nodes.append(node)
        self._end()
        return self._steps

    def _end(self) -> None:
        self._steps += [step for step in (self._host, self._ops) if step.nodes]
        self._host, self._ops = Step("host"), Step("ops")

    def _step_of(self, node: Node) -> Step:
        every = (*self._steps, self._host, self._ops)
        return next(step for step in every if node in step.nodes)

    def _is_captured(self, node: Node) -> bool:
        """Whether the device alone runs it. Of the host it may read numbers."""
        made = [node] if "device" in node.meta else [n for n in node.users if is_item(n)]
        if node.op == "get_attr" or any(self._at(n) != self._device for n in made):
            return False
        inputs = node.all_input_nodes
        there = [n for n in inputs if self._at(n) == self._device]
        return all(n in there or n.meta.get("shape") == () for n in inputs) and (
            bool(there) or bool(made)
        )

    def _at(self, node: Node) -> str:
        device = node.meta.get("device")
        return "" if device is None else device.type

    def _is_read(self, node: Node) -> bool:
        """Whether an op of the stretch has read what ``node`` writes, or writes what it reads."""
        written = node.meta.get("written", set())
        read = {n.meta.get("memory") for other in self._ops.nodes for n in other.all_input_nodes}
        put = {m for other in self._ops.nodes for m in other.meta.get("written", ())}
        mine = {n.meta.get("memory") for n in node.all_input_nodes}
        return bool(written & read or put & mine)


def _is_call(node: Node) -> bool:
    """Whether Python runs in it, or torch draws random numbers."""
    target: Any = node.target
    if target in ORDERED or target is DRAWN:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
