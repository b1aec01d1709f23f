"""Program of a recorded step: segments of ops, and between them calls that run as written.

```
segment 0:  forward, backward
assign      gradients
break       optimizer.step()
segment 1:  what comes after it
```
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.fx import GraphModule

from ..dispatch.plans.gradients import set_raw_grad
from ..dispatch.plans.shards import attach, is_global
from ..forms.random import generator
from ..forms.seeds import signed
from ..spec.nested import map_each
from ..spec.tracer import Tracer, callbacks
from .opaque import SENDING, Call, known, shape_of
from .watching import Pieces, Watching

_Off = torch._C.DisableTorchFunction
_T = torch.Tensor
_ON_COMPILED = callbacks("on_compiled")


def GRAPH_BREAK(number: int) -> None:  # noqa: N802 - a marker among the ops of a graph
    """Marker in a graph for a call that runs as written."""


class Like(NamedTuple):
    """Description of a tensor that is not kept. ``shape`` is that of the whole tensor, ``bytes``
    the size of this rank's shard."""

    spec: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


class Read:
    """A value that a program reads, and where from.

    Args:
        kind: "argument", "source", "rate" (a learning rate that is a number), or "key" (seed and
            draws so far).
        at: the argument's position, the Source, or the optimizer's group.
        x: the tensor that was there when the step was recorded; after the recording, a description
            of that tensor. Of a rate, the tensor that holds the number.
        segment: of a key, the segment that reads it.
    """

    def __init__(self, kind: str, at: Any = None, x: Any = None, segment: int = 0) -> None:
        self.kind, self.at, self.x, self.segment = kind, at, x, segment

    def recorded(self) -> Read:
        """Return this read for a program, with a description in place of the recorded tensor, so
        that no such tensor is kept."""
        if self.kind not in ("argument", "source"):
            return self
        sizes, dtype, _ = shape_of(self.x)
        held = math.prod(sizes) * dtype.itemsize
        spec = self.x._spec if is_global(self.x) else None
        return Read(self.kind, self.at, Like(spec, dtype, tuple(self.x.shape), held))

    def read(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that is there now."""
        match self.kind:
            case "argument":
                return arguments[self.at]
            case "source":
                return self.at.read()
            case "rate":
                return self.x.fill_(self.at["lr"])
            case _:
                seed, counter = generator.get_state()
                return torch.tensor([signed(seed), counter])


@dataclass(frozen=True)
class Place:
    """The origin of a tensor: a value of the program, with its spec if it is a global tensor; or
    the very object that is passed as an argument or held by a source."""

    value: int | None
    spec: Any = None
    argument: int | None = None
    source: Any = None

    def get(self, values: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Return the tensor."""
        if self.argument is not None:
            return arguments[self.argument]
        if self.source is not None:
            return self.source.read()
        assert self.value is not None
        x = values[self.value].detach()
        return x if self.spec is None else attach(x, self.spec)


@dataclass(frozen=True)
class Write:
    """An assignment of a tensor, or of None, to a source at the end of a segment."""

    source: Any
    value: Place | None

    def run(self, values: Sequence[Any]) -> None:
        """Make the assignment."""
        x = None if self.value is None else self.value.get(values, ())
        if isinstance(self.source.store, torch.Tensor) and is_global(self.source.store):
            if x is not None:
                # The gradient of a global leaf also replaces addends that wait to be added to it.
                set_raw_grad(self.source.store, x)
                return
        self.source.write(x)


@dataclass
class Segment:
    """Ops that run as one callable, and what follows them.

    Args:
        graph: takes ``inputs`` and returns ``outputs``, which are numbers of values.
        reads: values that are read before the graph runs.
        writes: assignments to sources after it.
        draws: number of random ops in it.
        graph_break: a call that runs as written, after the writes; ``text`` describes it.
    """

    graph: GraphModule
    inputs: list[int]
    outputs: list[int]
    reads: list[tuple[int, Read]]
    writes: list[Write]
    draws: int
    graph_break: Callable[[], Any] | None = None
    text: str = ""
    compiled: Callable[..., Any] | None = None
    _shards: dict[int, tuple[Any, int, torch.Tensor]] = field(default_factory=dict)

    def shards(self, inputs: list[Any], passing: set[int]) -> list[torch.Tensor]:
        """Replace global tensors among ``inputs`` by plain tensors in the same memory, because
        kernels and messages that are written in Python ask for the shape of the shard. The plain
        tensors of places are cached; those of ``passing`` values, which the caller provides, are
        not, so that they are freed with the caller's tensor."""
        for i, x in enumerate(inputs):
            if x.__class__ is _T:
                continue
            kept = self._shards.get(i)
            if kept is not None and kept[0] is x and kept[1] == _T.data_ptr(x):
                inputs[i] = kept[2]
            else:
                # detach() first, so that x does not become the base of a view: x may be moved.
                inputs[i] = _T.as_subclass(_T.detach(x), _T)
                if self.inputs[i] not in passing:
                    self._shards[i] = x, _T.data_ptr(x), inputs[i]
        return inputs

    def forget_shards(self) -> None:
        """Drop the cached plain tensors, because the tensors of places have other memory now."""
        self._shards.clear()


@dataclass(eq=False)
class Program:
    """The segments of a recorded step, in the order in which they run."""

    name: str
    segments: list[Segment]
    result: Any
    calls: dict[int, Call]
    count: int  # number of values
    backend: Callable[..., Any]
    saved: list[Any] = field(default_factory=list)  # messages that passes removed
    notes: list[str] = field(default_factory=list)  # other decisions, for people
    pieces: list[Pieces] | None = None  # how reports name its parts; made by the first report

    def __post_init__(self) -> None:
        reads = [read for part in self.segments for read in part.reads]
        self._passing = {i for i, source in reads if source.kind == "argument"}
        _programs.add(self)

    def run(self, arguments: Sequence[torch.Tensor]) -> Any:
        """Run the program, and return the result of the step."""
        if not _ON_COMPILED:
            return self._run(arguments, None)
        with Watching(self) as watch:
            return self._run(arguments, watch)

    def _run(self, arguments: Sequence[torch.Tensor], watch: Watching | None) -> Any:
        values: list[Any] = [None] * self.count
        with torch.no_grad(), known(self.calls, watch):
            for number, part in enumerate(self.segments):
                for i, read in part.reads:
                    values[i] = read.read(arguments)
                with _Off():
                    inputs = part.shards([values[i] for i in part.inputs], self._passing)
                    run = part.compiled
                    if run is None:
                        run = part.compiled = self.backend(part.graph, inputs)
                    made = watch.segment(number, run, inputs) if watch else run(*inputs)
                for i, x in zip(part.outputs, made, strict=True):
                    values[i] = x
                if part.draws:
                    _advance(part.draws)
                for write in part.writes:
                    write.run(values)
                if part.graph_break is not None:
                    with torch.enable_grad():
                        watch.graph_break(part) if watch else part.graph_break()
            return _built(self.result, values, arguments)

    def messages(self) -> list[Call]:
        """Return what this rank sends and receives, in order."""
        return [
            self.calls[node.args[1]]
            for part in self.segments
            for node in part.graph.graph.nodes
            if node.target in SENDING
        ]

    @property
    def bytes(self) -> int:
        """The bytes that this rank sends in a step, without those of the calls at graph breaks."""
        return sum(call.bytes for call in self.messages())


_programs: WeakSet[Program] = WeakSet()


def _forget_shards() -> None:
    """Drop references to the memory that tensors had before they were moved to other ranks."""
    for program in list(_programs):
        for part in program.segments:
            part.forget_shards()


Tracer(on_move=_forget_shards).always()


def _built(template: Any, values: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
    """Return a result like ``template``. Its lists and dicts are new in each call."""
    made = map_each(template, Place, lambda place: place.get(values, arguments))
    return copy.deepcopy(made) if made is template else made


def _advance(draws: int) -> None:
    state = generator.get_state()
    generator.set_count(torch.default_generator, state.counter + draws)
