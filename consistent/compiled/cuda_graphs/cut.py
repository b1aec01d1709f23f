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
from ..opaque import DRAWN, ORDERED_OPS


@dataclass
class SegmentStep:
    """Consecutive nodes of a segment that run in the same way.

    ``kind`` is "ops" (device ops, which are captured), "host" (ops on CPU tensors), or "call" (one
    message or random op, with the nodes that take its results).
    """

    kind: str
    nodes: list[Node] = field(default_factory=list)


def split_into_steps(graph: GraphModule, device: str) -> list[SegmentStep]:
    """Divide a segment into steps that run one after another, and return them.

    Each is captured as a CUDA graph, or runs on the host, or is a message or random op. ``device``
    is the type of the device whose ops are captured.
    """
    return _SegmentCutter(graph, device).steps()


class _SegmentCutter:
    def __init__(self, graph: GraphModule, device: str) -> None:
        self._graph, self._device = graph, device
        self._steps: list[SegmentStep] = []
        self._host_step, self._device_step = SegmentStep("host"), SegmentStep("ops")

    def steps(self) -> list[SegmentStep]:
        for node in self._graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if is_item(node):
                # An item runs with the op whose result it takes, even if that step has ended.
                self._step_of(node.all_input_nodes[0]).nodes.append(node)
            elif _is_call(node):
                self._end_stretch()
                self._steps.append(SegmentStep("call", [node]))
            elif self._is_captured(node):
                self._device_step.nodes.append(node)
            else:
                device_nodes = set(self._device_step.nodes)
                if device_nodes.intersection(node.all_input_nodes) or self._must_follow_device_ops(
                    node
                ):
                    self._end_stretch()
                self._host_step.nodes.append(node)
        self._end_stretch()
        return self._steps

    def _end_stretch(self) -> None:
        self._steps += [step for step in (self._host_step, self._device_step) if step.nodes]
        self._host_step, self._device_step = SegmentStep("host"), SegmentStep("ops")

    def _step_of(self, node: Node) -> SegmentStep:
        all_steps = (*self._steps, self._host_step, self._device_step)
        return next(step for step in all_steps if node in step.nodes)

    def _is_captured(self, node: Node) -> bool:
        """Return whether the op runs on the device alone, so that it can be captured.

        All its inputs and results must be on the device, except that host scalars are allowed as
        inputs.
        """
        results = [node] if "device" in node.meta else [n for n in node.users if is_item(n)]
        if node.op == "get_attr" or any(self._device_type(n) != self._device for n in results):
            return False
        inputs = node.all_input_nodes
        device_inputs = [n for n in inputs if self._device_type(n) == self._device]
        return all(n in device_inputs or n.meta.get("shape") == () for n in inputs) and (
            bool(device_inputs) or bool(results)
        )

    def _device_type(self, node: Node) -> str:
        device = node.meta.get("device")
        return "" if device is None else device.type

    def _must_follow_device_ops(self, node: Node) -> bool:
        """Return whether the host op ``node`` must run after the device ops collected so far.

        That is the case if it writes memory that one of them has read, or reads memory that one of
        them writes.
        """
        written_by_host = node.meta.get("written", set())
        read_by_device = {
            n.meta.get("memory") for other in self._device_step.nodes for n in other.all_input_nodes
        }
        written_by_device = {
            m for other in self._device_step.nodes for m in other.meta.get("written", ())
        }
        read_by_host = {n.meta.get("memory") for n in node.all_input_nodes}
        return bool(written_by_host & read_by_device or written_by_device & read_by_host)


def _is_call(node: Node) -> bool:
    """Return whether the op is a message or draws random numbers, so that it cannot be captured."""
    target: Any = node.target
    if target in ORDERED_OPS or target is DRAWN:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
