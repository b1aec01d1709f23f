"""What a recorded step is: segments of ops, with calls between them that run as they are written.

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
    """Where a call stands that runs as it is written."""


class Like(NamedTuple):
    """What is said of a tensor that is not kept: shape of the whole, bytes of this rank's part."""

    spec: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


class Read:
    """Where a program reads a value from.

    Args:
        kind: "argument", "source", "rate" (a learning rate that is a number), or "key" (seed and
            draws so far).
        at: the argument's position, the Source, or the group of the optimizer.
        x: the tensor that was there when the step was recorded; once it was, what it was like. Of
            a rate, the tensor that it is put into.
        segment: of a key.
    """

    def __init__(self, kind: str, at: Any = None, x: Any = None, segment: int = 0) -> None:
        self.kind, self.at, self.x, self.segment = kind, at, x, segment

    def recorded(self) -> Read:
        """The value for a program, which keeps none of the tensors that it was recorded with."""
        if self.kind not in ("argument", "source"):
            return self
        sizes, dtype, _ = shape_of(self.x)
        held = math.prod(sizes) * dtype.itemsize
        spec = self.x._spec if is_global(self.x) else None
        return Read(self.kind, self.at, Like(spec, dtype, tuple(self.x.shape), held))

    def read(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that is there now."""
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
    """Where a tensor comes from: a value of the program, with its spec if it is a global tensor; or
    the very object that is an argument, or that a source holds."""

    value: int | None
    spec: Any = None
    argument: int | None = None
    source: Any = None

    def get(self, values: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
        """The tensor."""
        if self.argument is not None:
            return arguments[self.argument]
        if self.source is not None:
            return self.source.read()
        assert self.value is not None
        x = values[self.value].detach()
        return x if self.spec is None else attach(x, self.spec)


@dataclass(frozen=True)
class Write:
    """What is put into a source; nothing where ``value`` is None."""

    source: Any
    value: Place | None

    def run(self, values: Sequence[Any]) -> None:
        """Put it there."""
        x = None if self.value is None else self.value.get(values, ())
        if isinstance(self.source.store, torch.Tensor) and is_global(self.source.store):
            if x is not None:
                set_raw_grad(self.source.store, x)
                return
        self.source.write(x)


@dataclass
class Segment:
    """Ops that run as one callable, and what follows them.

    Args:
        graph: takes ``inputs`` and gives ``outputs``, which are numbers of values.
        reads: values that are read before it runs.
        writes: what is put into places after it.
        draws: random ops in it.
        graph_break: a call that is left to Python, after all that; ``text`` is how it is shown.
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
        """Plain tensors in the memory of ``inputs``: kernels and messages that are written in
        Python ask them for their shapes. Those of places, which stay, are kept; those of values
        that are ``passing``, which the caller gives, go when the caller lets them go."""
        for i, x in enumerate(inputs):
            if x.__class__ is _T:
                continue
            kept = self._shards.get(i)
            if kept is not None and kept[0] is x and kept[1] == _T.data_ptr(x):
                inputs[i] = kept[2]
            else:
                inputs[i] = _T.as_subclass(_T.detach(x), _T)  # x is not its base: x may move
                if self.inputs[i] not in passing:
                    self._shards[i] = x, _T.data_ptr(x), inputs[i]
        return inputs

    def forget_shards(self) -> None:
        """Let go what is kept: tensors of places have other memory now."""
        self._shards.clear()


@dataclass(eq=False)
class Program:
    """Segments, one after another."""

    name: str
    segments: list[Segment]
    result: Any
    calls: dict[int, Call]
    count: int  # of values
    backend: Callable[..., Any]
    saved: list[Any] = field(default_factory=list)  # messages that passes left out
    notes: list[str] = field(default_factory=list)  # what else was decided
    pieces: list[Pieces] | None = None  # what reports call its parts, once one has watched it

    def __post_init__(self) -> None:
        reads = [read for part in self.segments for read in part.reads]
        self._passing = {i for i, source in reads if source.kind == "argument"}
        _programs.add(self)

    def run(self, arguments: Sequence[torch.Tensor]) -> Any:
        """The result of the step."""
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
        """What this rank sends and receives, in order."""
        return [
            self.calls[node.args[1]]
            for part in self.segments
            for node in part.graph.graph.nodes
            if node.target in SENDING
        ]

    @property
    def bytes(self) -> int:
        """What this rank sends in a step, without what calls at graph breaks send."""
        return sum(call.bytes for call in self.messages())


_programs: WeakSet[Program] = WeakSet()


def _forget_shards() -> None:
    """Let go of the memory that tensors had before they were moved."""
    for program in list(_programs):
        for part in program.segments:
            part.forget_shards()


Tracer(on_move=_forget_shards).always()


def _built(template: Any, values: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
    """A result; lists and dicts in it are new in each call."""
    made = map_each(template, Place, lambda place: place.get(values, arguments))
    return copy.deepcopy(made) if made is template else made


def _advance(draws: int) -> None:
    state = generator.get_state()
    generator.set_count(torch.default_generator, state.counter + draws)
