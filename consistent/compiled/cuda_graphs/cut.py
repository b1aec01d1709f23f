"""Division of a segment into stretches of device ops, which CUDA graphs can capture, and what runs
between them.

```
ops       mm, gelu, mm                 captured
call      message all_reduce           runs Python: sends, or draws random numbers
host      add (count of steps)         ops on the host, done before the ops of their stretch
ops       add, layer_norm, ...         captured
```

The host ops of a stretch read nothing that its device ops compute, so they can run first. The
stretch ends at a host op that writes what one of its device ops has read, or that needs a value
from the device.
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
    """Consecutive nodes of a segment that run in the same way.

    ``kind`` is "ops" (device ops, which are captured), "host" (ops on CPU tensors), or "call" (one
    message or random op, with the nodes that take its results).
    """

    kind: str
    nodes: list[Node] = field(default_factory=list)


def cut(graph: GraphModule, device: str) -> list[Step]:
    """Divide a segment into steps that run one after another, and return them.

    Each is captured as a CUDA graph, or runs on the host, or is a message or random op. ``device``
    is the type of the device whose ops are captured.
    """
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
                # An item runs with the op whose result it takes, even if that step has ended.
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
        """Return whether the op runs on the device alone, so that it can be captured.

        All its inputs and results must be on the device, except that host scalars are allowed as
        inputs.
        """
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
        """Return whether the host op ``node`` must run after the device ops collected so far.

        That is the case if it writes memory that one of them has read, or reads memory that one of
        them writes.
        """
        written = node.meta.get("written", set())
        read = {n.meta.get("memory") for other in self._ops.nodes for n in other.all_input_nodes}
        put = {m for other in self._ops.nodes for m in other.meta.get("written", ())}
        mine = {n.meta.get("memory") for n in node.all_input_nodes}
        return bool(written & read or put & mine)


def _is_call(node: Node) -> bool:
    """Return whether the op is a message or draws random numbers, so that it cannot be captured."""
    target: Any = node.target
    if target in ORDERED or target is DRAWN:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
