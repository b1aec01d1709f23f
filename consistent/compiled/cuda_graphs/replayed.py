"""A segment whose stretches of ops are captured, and replayed from then on.

```
call 1       runs as it is                     warm-up; where inputs lie is noted
call 2       each stretch: capture, replay     what lay elsewhere gets a buffer at a fixed address
call 3 ...   copy into buffers, replay         what lies where it lay is read there
```

Parameters and states stay where they are. If one has moved, all stretches are captured again, in a
pool of their own: graphs of a pool are replayed in the order of their capture. What a segment
gives is copied out of the pool, as the next replay writes there; views of one memory stay views of
one copy.
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
from .cut import Step, cut

MOST = 4  # captures of a segment; what moves more often than that is not worth them
Run = Callable[..., Sequence[Tensor]]
Backend = Callable[[GraphModule, Sequence[Tensor]], Run]


class Capturer(Protocol):
    """Captures what a device does. One is made for each time that a segment is captured."""

    device: str

    def warm_up(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]: ...

    def capture(
        self, run: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], None], list[Tensor]]: ...


def replayed(backend: Backend, capturer: Callable[[], Capturer], device: str) -> Backend:
    """``backend``, whose stretches of ops on ``device`` are captured."""

    def make(graph: GraphModule, inputs: Sequence[Tensor]) -> Run:
        if any(x.is_meta for x in inputs):
            return backend(graph, inputs)
        return Replayed(graph, backend, capturer, device)

    return make


@dataclass
class _Part:
    """A step as a graph of its own. ``captured``: (replay, results), once it is."""

    step: Step
    graph: GraphModule
    given: list[Node]
    own: list[Node]
    run: Run | None = None
    captured: tuple[Callable[[], None], list[Tensor]] | None = None
    inputs: list[Tensor] = field(default_factory=list)  # those of the capture


class Replayed:
    """Runs a segment.

    Raises:
        What its ops raise. An error of a capture is a warning, and the segment then runs as it is.
    """

    def __init__(
        self,
        graph: GraphModule,
        backend: Backend,
        capturer: Callable[[], Capturer],
        device: str,
    ) -> None:
        self._backend, self._make, self._device = backend, capturer, device
        self._reads = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._outs: list[Node] = list(
            next(n for n in graph.graph.nodes if n.op == "output").args[0]
        )
        self._parts = _parts(graph, cut(graph, device), self._outs)
        self._fixed = _fixed(graph, self._outs)
        self._capturer: Capturer | None = None
        self._addresses: dict[Node, int] = {}  # of what is read where it lies
        self._moving: set[Node] = set()  # what gets a buffer
        self._calls, self.captures, self.why = 0, 0, ""
        ops = [n for part in self._parts if part.step.kind == "ops" for n in part.step.nodes]
        self._where = next((n.meta["device"] for n in ops if "device" in n.meta), None)
        if self._where is None:
            self._stop(f"no op of it runs on {device}")

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        values: dict[Node, Any] = dict(zip(self._reads, inputs, strict=True))
        self._calls += 1
        if self._calls == 1:
            self._addresses = {n: _address(x) for n, x in values.items()}
        elif not self.why:
            self._look(values)
        for part in self._parts:
            given = [values[n] for n in part.given]
            if part.step.kind == "call":
                made = _called(part, values)
            elif part.step.kind == "host" or self.why:
                made = self._plain(part, given)
            elif self._calls == 1:
                made = self._warmed(part, given)
            else:
                made = self._replay(part, given)
            values.update(zip(part.own, made, strict=True))
        return self._out([values[n] for n in self._outs])

    # -- what has moved ----------------------------------------------------------------------------

    def _look(self, values: dict[Node, Any]) -> None:
        """Forget what was captured if an input lies elsewhere that is read where it lies."""
        moved = [
            n
            for n, x in values.items()
            if n not in self._moving and self._addresses[n] != _address(x)
        ]
        if not moved:
            return
        for n in moved:
            self._addresses[n] = _address(values[n])
            if n not in self._fixed and _has_buffer(values[n]):
                self._moving.add(n)
        if self.captures:
            self._forget()

    def _forget(self) -> None:
        self._capturer = None
        for part in self._parts:
            part.captured, part.inputs = None, []
        if self.captures >= MOST:
            self._stop(
                f"tensors that it writes, or views of them that it gives, lie elsewhere in each "
                f"call; it was captured {self.captures} times"
            )

    def _stop(self, why: str) -> None:
        self.why = why
        warnings.warn(
            f"consistent.compile: a part of the program runs without cuda_graph: {why}.",
            stacklevel=2,
        )

    # -- one part ----------------------------------------------------------------------------------

    def _plain(self, part: _Part, given: list[Tensor]) -> Sequence[Tensor]:
        if part.step.kind == "host":
            return part.graph.forward(*given)
        given = [x if x.device.type == self._device else x.to(self._where) for x in given]
        if part.run is None:
            part.run = self._backend(part.graph, given)
        return part.run(*given)

    def _warmed(self, part: _Part, given: list[Tensor]) -> Sequence[Tensor]:
        if self._capturer is None:
            self._capturer = self._make()
        return self._capturer.warm_up(lambda: self._plain(part, given))

    def _replay(self, part: _Part, given: list[Tensor]) -> Sequence[Tensor]:
        if part.captured is None:
            part.inputs = [self._at_fixed_address(n, x) for n, x in zip(part.given, given)]
            try:
                part.captured = self._capture(part)
            except Exception as error:  # of the device: what it may be is not known
                self._stop(f"{type(error).__name__} at capture: {str(error).splitlines()[0]}")
                return self._plain(part, given)
        for place, x in zip(part.inputs, given, strict=True):
            if place is not x and place.data_ptr() != x.data_ptr():
                place.copy_(x)
        replay, made = part.captured
        replay()
        return made

    def _capture(self, part: _Part) -> tuple[Callable[[], None], list[Tensor]]:
        if self._capturer is None:
            self._capturer = self._make()
        if not any(other.captured for other in self._parts):
            self.captures += 1
        return self._capturer.capture(lambda: self._plain(part, part.inputs))

    def _at_fixed_address(self, node: Node, x: Tensor) -> Tensor:
        """``x`` itself where it stays: it was made by a captured part, or lies in a place. Numbers
        of the host are brought to the device, since a graph would keep their value."""
        if x.device.type != self._device:
            return torch.empty_like(x, device=self._where)
        made = any(node in part.own and part.captured is not None for part in self._parts)
        if made or (node in self._addresses and node not in self._moving):
            return x
        if not _has_buffer(x):
            raise ValueError(f"an input of strides {x.stride()} lies elsewhere in each call")
        return x.clone()

    def _out(self, results: list[Tensor]) -> list[Tensor]:
        """Results outside of the memory that the next replay writes."""
        ours = {
            storage_of(x)
            for part in self._parts
            if part.captured is not None
            for x in part.captured[1]
            if has_memory(x)
        }
        ours -= {
            storage_of(x)
            for p in self._parts
            for n, x in zip(p.given, p.inputs)
            if n in self._addresses
        }
        inside = [has_memory(x) and storage_of(x) in ours for x in results]
        count: dict[int, int] = {}
        for x, is_inside in zip(results, inside, strict=True):
            if is_inside:
                count[storage_of(x)] = count.get(storage_of(x), 0) + 1
        copies: dict[int, torch.UntypedStorage] = {}
        return [
            _copy(x, count[storage_of(x)] == 1, copies) if is_inside else x
            for x, is_inside in zip(results, inside, strict=True)
        ]


def _copy(x: Tensor, alone: bool, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    if alone and _has_buffer(x):
        return x.clone()
    at = storage_of(x)
    if at not in copies:
        copies[at] = x.untyped_storage().clone()
    return x.new_empty(0).set_(copies[at], x.storage_offset(), x.size(), x.stride())


def _parts(graph: GraphModule, steps: list[Step], outs: list[Node]) -> list[_Part]:
    """The steps as graphs, with what each takes from others and gives to them."""
    constants = dict(graph.named_buffers())
    parts = []
    for i, step in enumerate(steps):
        inside = set(step.nodes)
        later = {n for other in steps[i + 1 :] for m in other.nodes for n in m.all_input_nodes}
        given = [n for m in step.nodes for n in m.all_input_nodes if n not in inside]
        given = list(dict.fromkeys(given))
        own = [n for n in step.nodes if n in later or n in outs]
        parts.append(_Part(step, part_of(step.nodes, given, own, constants), given, own))
    return parts


def _fixed(graph: GraphModule, outs: list[Node]) -> set[Node]:
    """The inputs that are read where they lie wherever that is: what is written into, and what a
    result is a view of."""
    nodes = graph.graph.nodes
    there = {m for n in nodes for m in n.meta.get("written", ())}
    there |= {n.meta.get("memory") for n in outs}
    return {n for n in nodes if n.op == "placeholder" and n.meta.get("memory") in there}


def _called(part: _Part, values: dict[Node, Any]) -> list[Any]:
    """A message, or a draw; its results are plain calls, too."""
    node, *items = part.step.nodes
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    made = target(*args, **kwargs)
    own = {node: made, **{item: made[item.args[1]] for item in items}}  # type: ignore[index]
    return [own[n] for n in part.own]


def _address(x: Tensor) -> int:
    return x.data_ptr() if has_memory(x) else 0


def _has_buffer(x: Tensor) -> bool:
    """Whether a copy of it lies as it does."""
    if not has_memory(x) or x.numel() == 0:
        return has_memory(x)
    dense = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return True
