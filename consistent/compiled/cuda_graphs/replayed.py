"""Execution of a segment by CUDA graphs: its stretches of device ops are captured once, and then
replayed.

```
call 1       runs uncaptured                   warm-up; the addresses of inputs are noted
call 2       each stretch: capture, replay     inputs whose address changed get a buffer
call 3 ...   copy into buffers, replay         inputs whose address is unchanged are read in place
```

A graph reads its inputs at the addresses of the capture. Parameters and states normally keep their
address. If one has moved, all stretches are captured again, in a new pool, because graphs of a pool
are replayed in the order of their capture. Results of a segment are copied out of the pool, since
the next replay overwrites them; views of one storage stay views of one copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..memory import has_memory, storage_of
from ..parts import part_of
from .cut import SegmentStep, split_into_steps

MAX_CAPTURES = 4  # captures of a segment; if tensors move more often, capturing does not pay
CompiledCallable = Callable[..., Sequence[Tensor]]
Backend = Callable[[GraphModule, Sequence[Tensor]], CompiledCallable]


class Capturer(Protocol):
    """Protocol of objects that capture device work; ``cuda.CudaGraphs`` is one.

    A new one is made each time a segment is captured.
    """

    device: str

    def warm_up(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]: ...

    def capture(
        self, run: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], None], list[Tensor]]: ...


def replaying_backend(backend: Backend, capturer: Callable[[], Capturer], device: str) -> Backend:
    """Return a backend that compiles by ``backend``, and runs ops on ``device`` by CUDA graphs.

    Args:
        capturer: makes the object that captures, anew for each capture of a segment.
        device: type of the device, such as "cuda".
    """

    def compile_segment(graph: GraphModule, inputs: Sequence[Tensor]) -> CompiledCallable:
        if any(x.is_meta for x in inputs):
            return backend(graph, inputs)
        return ReplayedSegment(graph, backend, capturer, device)

    return compile_segment


@dataclass
class _Part:
    """One step of a segment (captured device ops, host ops, or a call) as a graph module.

    Args:
        input_nodes, output_nodes: nodes whose values it takes from other parts, and those that it
            passes on.
        run: the compiled graph; None before its first run.
        captured: (function that replays, results), once captured.
        inputs: the tensors at whose addresses the captured graph reads ``input_nodes``.
    """

    step: SegmentStep
    graph: GraphModule
    input_nodes: list[Node]
    output_nodes: list[Node]
    run: CompiledCallable | None = None
    captured: tuple[Callable[[], None], list[Tensor]] | None = None
    inputs: list[Tensor] = field(default_factory=list)  # at the addresses that the capture reads


class ReplayedSegment:
    """Callable that runs a segment: its device ops by captured CUDA graphs, other ops directly.

    An error during a capture is only a warning; the segment then runs uncaptured. Other errors of
    its ops are raised.

    Args:
        graph: the segment.
        backend: compiles the parts of it that are captured.
        capturer: makes the object that captures, anew for each capture of the segment.
        device: type of the device whose ops are captured.
    """

    def __init__(
        self,
        graph: GraphModule,
        backend: Backend,
        capturer: Callable[[], Capturer],
        device: str,
    ) -> None:
        self._backend, self._make_capturer, self._device = backend, capturer, device
        self._input_nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._result_nodes: list[Node] = list(
            next(n for n in graph.graph.nodes if n.op == "output").args[0]
        )
        self._parts = _parts(graph, split_into_steps(graph, device), self._result_nodes)
        self._inputs_read_in_place = _inputs_read_in_place(graph, self._result_nodes)
        self._capturer: Capturer | None = None
        self._addresses: dict[Node, int] = {}  # of inputs that are read in place
        self._moving_inputs: set[Node] = set()  # inputs that are copied into a buffer
        self._call_count, self.captures, self.why = 0, 0, ""
        ops = [n for part in self._parts if part.step.kind == "ops" for n in part.step.nodes]
        self._target_device = next((n.meta["device"] for n in ops if "device" in n.meta), None)
        if self._target_device is None:
            self._stop_capturing(f"no op of it runs on {device}")

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        values: dict[Node, Any] = dict(zip(self._input_nodes, inputs, strict=True))
        self._call_count += 1
        if self._call_count == 1:
            self._addresses = {n: _address(x) for n, x in values.items()}
        elif not self.why:
            self._drop_moved_captures(values)
        for part in self._parts:
            inputs_of_part = [values[n] for n in part.input_nodes]
            if part.step.kind == "call":
                results = _run_call(part, values)
            elif part.step.kind == "host" or self.why:
                results = self._run_uncaptured(part, inputs_of_part)
            elif self._call_count == 1:
                results = self._run_warm_up(part, inputs_of_part)
            else:
                results = self._replay(part, inputs_of_part)
            values.update(zip(part.output_nodes, results, strict=True))
        return self._copy_captured_results([values[n] for n in self._result_nodes])

    # -- what has moved ----------------------------------------------------------------------------

    def _drop_moved_captures(self, values: dict[Node, Any]) -> None:
        """Drop all captures if a tensor that they read in place has moved to another address.

        ``values`` are the inputs of the present call. An input that has moved is read through a
        buffer from then on, unless it must be read in place (``_inputs_read_in_place``) or has
        gaps.
        """
        moved = [
            n
            for n, x in values.items()
            if n not in self._moving_inputs and self._addresses[n] != _address(x)
        ]
        if not moved:
            return
        for n in moved:
            self._addresses[n] = _address(values[n])
            if n not in self._inputs_read_in_place and _has_no_gaps(values[n]):
                self._moving_inputs.add(n)
        if self.captures:
            self._drop_captures()

    def _drop_captures(self) -> None:
        self._capturer = None
        for part in self._parts:
            part.captured, part.inputs = None, []
        if self.captures >= MAX_CAPTURES:
            self._stop_capturing(
                f"tensors that it writes, or views of them that it gives, lie elsewhere in each "
                f"call; it was captured {self.captures} times"
            )

    def _stop_capturing(self, why: str) -> None:
        self.why = why
        warnings.warn(
            f"consistent.compile: a part of the program runs without cuda_graph: {why}.",
            stacklevel=2,
        )

    # -- one part ----------------------------------------------------------------------------------

    def _run_uncaptured(self, part: _Part, inputs: list[Tensor]) -> Sequence[Tensor]:
        if part.step.kind == "host":
            return part.graph.forward(*inputs)
        inputs = [x if x.device.type == self._device else x.to(self._target_device) for x in inputs]
        if part.run is None:
            part.run = self._backend(part.graph, inputs)
        return part.run(*inputs)

    def _run_warm_up(self, part: _Part, inputs: list[Tensor]) -> Sequence[Tensor]:
        if self._capturer is None:
            self._capturer = self._make_capturer()
        return self._capturer.warm_up(lambda: self._run_uncaptured(part, inputs))

    def _replay(self, part: _Part, inputs: list[Tensor]) -> Sequence[Tensor]:
        if part.captured is None:
            part.inputs = [self._at_fixed_address(n, x) for n, x in zip(part.input_nodes, inputs)]
            try:
                part.captured = self._capture(part)
            except Exception as error:  # devices raise many kinds of errors
                self._stop_capturing(
                    f"{type(error).__name__} at capture: {str(error).splitlines()[0]}"
                )
                return self._run_uncaptured(part, inputs)
        for buffer, x in zip(part.inputs, inputs, strict=True):
            if buffer is not x and buffer.data_ptr() != x.data_ptr():
                buffer.copy_(x)
        replay, results = part.captured
        replay()
        return results

    def _capture(self, part: _Part) -> tuple[Callable[[], None], list[Tensor]]:
        if self._capturer is None:
            self._capturer = self._make_capturer()
        # Counted once for the segment, at its first part.
        if not any(other.captured for other in self._parts):
            self.captures += 1
        return self._capturer.capture(lambda: self._run_uncaptured(part, part.inputs))

    def _at_fixed_address(self, node: Node, x: Tensor) -> Tensor:
        """Return the tensor that a captured graph will read as ``x``, the value of ``node``.

        This is ``x`` itself if its address stays the same in all calls, because a captured part
        made it or it is a parameter or state; otherwise a buffer into which each call copies ``x``.
        A host scalar gets a buffer on the device, because a graph would otherwise contain its value
        as a constant.
        """
        if x.device.type != self._device:
            return torch.empty_like(x, device=self._target_device)
        is_captured = any(
            node in part.output_nodes and part.captured is not None for part in self._parts
        )
        if is_captured or (node in self._addresses and node not in self._moving_inputs):
            return x
        if not _has_no_gaps(x):
            raise ValueError(f"an input of strides {x.stride()} lies elsewhere in each call")
        return x.clone()

    def _copy_captured_results(self, results: list[Tensor]) -> list[Tensor]:
        """Return ``results``, with copies of those that the next replay would overwrite."""
        captured_storages = {
            storage_of(x)
            for part in self._parts
            if part.captured is not None
            for x in part.captured[1]
            if has_memory(x)
        }
        # Inputs that are read in place belong to the caller, even if a part returns a view of one.
        captured_storages -= {
            storage_of(x)
            for p in self._parts
            for n, x in zip(p.input_nodes, p.inputs)
            if n in self._addresses
        }
        is_captured = [has_memory(x) and storage_of(x) in captured_storages for x in results]
        counts: dict[int, int] = {}
        for x, is_captured_result in zip(results, is_captured, strict=True):
            if is_captured_result:
                counts[storage_of(x)] = counts.get(storage_of(x), 0) + 1
        copies: dict[int, torch.UntypedStorage] = {}
        return [
            _copy(x, counts[storage_of(x)] == 1, copies) if is_captured_result else x
            for x, is_captured_result in zip(results, is_captured, strict=True)
        ]


def _copy(x: Tensor, is_only_view: bool, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    if is_only_view and _has_no_gaps(x):
        return x.clone()
    storage = storage_of(x)
    if storage not in copies:
        copies[storage] = x.untyped_storage().clone()
    return x.new_empty(0).set_(copies[storage], x.storage_offset(), x.size(), x.stride())


def _parts(graph: GraphModule, steps: list[SegmentStep], outs: list[Node]) -> list[_Part]:
    """Return each step as a graph module, with the nodes that it takes from others and passes on.

    ``outs`` are the results of the segment.
    """
    constants = dict(graph.named_buffers())
    parts = []
    for i, step in enumerate(steps):
        inside = set(step.nodes)
        read_later = {n for other in steps[i + 1 :] for m in other.nodes for n in m.all_input_nodes}
        input_nodes = [n for m in step.nodes for n in m.all_input_nodes if n not in inside]
        input_nodes = list(dict.fromkeys(input_nodes))
        output_nodes = [n for n in step.nodes if n in read_later or n in outs]
        parts.append(
            _Part(
                step,
                part_of(step.nodes, input_nodes, output_nodes, constants),
                input_nodes,
                output_nodes,
            )
        )
    return parts


def _inputs_read_in_place(graph: GraphModule, outs: list[Node]) -> set[Node]:
    """Return the inputs that a captured graph must read in place, not from a copy.

    These are inputs into which an op writes, and those that share memory with a result.
    """
    nodes = graph.graph.nodes
    memories = {m for n in nodes for m in n.meta.get("written", ())}
    memories |= {n.meta.get("memory") for n in outs}
    return {n for n in nodes if n.op == "placeholder" and n.meta.get("memory") in memories}


def _run_call(part: _Part, values: dict[Node, Any]) -> list[Any]:
    """Run a step that is a message or a random op, and return the values that later steps read.

    ``values`` has the value of each node so far.
    """
    node, *items = part.step.nodes
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    results = target(*args, **kwargs)
    values_of = {node: results, **{item: results[item.args[1]] for item in items}}  # type: ignore[index]
    return [values_of[n] for n in part.output_nodes]


def _address(x: Tensor) -> int:
    return x.data_ptr() if has_memory(x) else 0


def _has_no_gaps(x: Tensor) -> bool:
    """Return whether ``x`` has no gaps, so that ``x.clone()`` has the same strides.

    Only such an input can be copied into a buffer in each call.
    """
    if not has_memory(x) or x.numel() == 0:
        return has_memory(x)
    dense = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return True
