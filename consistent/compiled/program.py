"""Program of a recorded step: segments of ops that are compiled, and graph breaks between them, at
which a call runs as written.

```
segment 0     forward, backward
assign        gradients
graph break   optimizer.step()
segment 1     the ops after it
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
from ..forms.seeds import signed_seed
from ..spec.nested import instances_in, replace_instances
from ..spec.tracer import Tracer, callbacks
from .opaque import SENDING_OPS, OpaqueCall, shape_of, use_calls
from .watching import EventReporter, SegmentEvents

_DisableTorchFunction = torch._C.DisableTorchFunction
_T = torch.Tensor
_ON_COMPILED = callbacks("on_compiled")


def GRAPH_BREAK(number: int) -> None:  # noqa: N802 - a marker among the ops of a graph
    """Marker in a recorded graph where it is split into segments; never called.

    ``number`` selects the Python call, such as ``optimizer.step()``, that runs there as written.
    """


class InputLike(NamedTuple):
    """Description of an input of a finished program, which must not keep the recorded tensor alive.

    ``shape`` is that of the whole tensor, ``bytes`` the size of this rank's shard.
    """

    spec: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


class Read:
    """An input of a program, and where to read it before each run.

    Args:
        kind: "argument" of the step, "source" (a place such as a module's parameter), "rate" (a
            learning rate that is a Python number), or "key" (seed and counter of random numbers).
        at: index among the tensors in the arguments, the Source, or the optimizer's param group.
        x: the tensor that was read when the step was recorded; after the recording, an
            ``InputLike`` of that tensor. For a rate, the tensor into which the number is written.
        segment: for a key, the segment that reads it.
    """

    def __init__(self, kind: str, at: Any = None, x: Any = None, segment: int = 0) -> None:
        self.kind, self.at, self.x, self.segment = kind, at, x, segment

    def recorded(self) -> Read:
        """Return a copy of this read for the finished program, without the recorded tensor.

        An ``InputLike`` replaces it, so that the program does not keep the tensor alive.
        """
        if self.kind not in ("argument", "source"):
            return self
        sizes, dtype, _ = shape_of(self.x)
        nbytes = math.prod(sizes) * dtype.itemsize
        spec = self.x._spec if is_global(self.x) else None
        return Read(self.kind, self.at, InputLike(spec, dtype, tuple(self.x.shape), nbytes))

    def read(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the present tensor of this input, for a run of the program with ``arguments``."""
        match self.kind:
            case "argument":
                return arguments[self.at]
            case "source":
                return self.at.read()
            case "rate":
                return self.x.fill_(self.at["lr"])
            case _:
                seed, counter = generator.get_state()
                return torch.tensor([signed_seed(seed), counter])


@dataclass(frozen=True)
class Place:
    """Origin of a tensor that a program returns or assigns: a value, an argument, or a source.

    Args:
        value: number of a value that the program computes. With ``spec``, the value is this rank's
            shard, and the tensor is the global tensor of this spec.
        argument: index of the tensor among the tensors in the step's arguments.
        source: a ``Source``, such as a module's attribute, that holds the tensor.
    """

    value: int | None
    spec: Any = None
    argument: int | None = None
    source: Any = None

    def get(self, values: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Return the tensor, for a run with ``arguments`` that has computed ``values``."""
        if self.argument is not None:
            return arguments[self.argument]
        if self.source is not None:
            return self.source.read()
        assert self.value is not None
        x = values[self.value].detach()
        return x if self.spec is None else attach(x, self.spec)


@dataclass(frozen=True)
class Write:
    """Assignment of a tensor, or of None, to a ``Source`` such as ``param.grad``.

    A program makes it at the end of a segment.
    """

    source: Any
    value: Place | None

    def run(self, values: Sequence[Any]) -> None:
        """Make the assignment, after a run of the segment that has computed ``values``."""
        x = None if self.value is None else self.value.get(values, ())
        if isinstance(self.source.store, torch.Tensor) and is_global(self.source.store):
            if x is not None:
                # This also drops gradients of the leaf that are not yet summed over ranks.
                set_raw_grad(self.source.store, x)
                return
        self.source.write(x)


@dataclass
class Segment:
    """Ops between two graph breaks, which are compiled as one callable, and what follows them.

    Args:
        graph: the ops; takes the values numbered ``inputs`` and returns those numbered ``outputs``.
        reads: (number of the value, where to read it), for values that are read before the graph
            runs.
        writes: assignments after the graph has run.
        draws: number of random ops in the graph.
        graph_break: function that is called, as written, after ``writes``; ``text`` describes it.
        compiled: result of the backend for the graph; None before the first run.
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

    def local_inputs(self, inputs: list[Any], argument_values: set[int]) -> list[torch.Tensor]:
        """Replace global tensors in the list ``inputs`` by plain tensors with their shards' memory.

        Kernels and messages written in Python then see the shape of the shard. The plain tensors of
        parameters and other state are cached for the next run. Those of the values numbered
        ``argument_values``, which are arguments of the step, are not cached, so that they are freed
        with the caller's tensor.
        """
        for i, x in enumerate(inputs):
            if x.__class__ is _T:
                continue
            cached = self._shards.get(i)
            if cached is not None and cached[0] is x and cached[1] == _T.data_ptr(x):
                inputs[i] = cached[2]
            else:
                # detach() first, so that x does not become the base of a view: x may be moved.
                inputs[i] = _T.as_subclass(_T.detach(x), _T)
                if self.inputs[i] not in argument_values:
                    self._shards[i] = x, _T.data_ptr(x), inputs[i]
        return inputs

    def forget_shards(self) -> None:
        """Drop the cached plain tensors; called when parameters or state have moved in memory."""
        self._shards.clear()


@dataclass(eq=False)
class Program:
    """Compiled recording of a step.

    Args:
        name: name of the step.
        segments: its parts, in the order in which they run.
        result: what the step returned, with a ``Place`` in place of each tensor.
        calls: recorded messages and random ops by number.
        count: number of values that segments read from or pass on to each other.
        backend: function that compiles the graph of a segment.
    """

    name: str
    segments: list[Segment]
    result: Any
    calls: dict[int, OpaqueCall]
    count: int  # number of values
    backend: Callable[..., Any]
    saved: list[Any] = field(default_factory=list)  # messages that passes removed
    notes: list[str] = field(default_factory=list)  # what else passes did, for ``show()``
    events: list[SegmentEvents] | None = None  # events for tracers; made by the first traced run

    def __post_init__(self) -> None:
        reads = [read for part in self.segments for read in part.reads]
        self._places = instances_in(self.result, Place)
        self._argument_values = {i for i, source in reads if source.kind == "argument"}
        _programs.add(self)

    def run(self, arguments: Sequence[torch.Tensor]) -> Any:
        """Run the program on the tensors among the arguments, and return the result of the step."""
        if not _ON_COMPILED:
            return self._run(arguments, None)
        with EventReporter(self) as watch:
            return self._run(arguments, watch)

    def _run(self, arguments: Sequence[torch.Tensor], watch: EventReporter | None) -> Any:
        values: list[Any] = [None] * self.count
        with torch.no_grad(), use_calls(self.calls, watch):
            for number, part in enumerate(self.segments):
                for i, read in part.reads:
                    values[i] = read.read(arguments)
                with _DisableTorchFunction():
                    inputs = part.local_inputs(
                        [values[i] for i in part.inputs], self._argument_values
                    )
                    run = part.compiled
                    if run is None:
                        run = part.compiled = self.backend(part.graph, inputs)
                    results = watch.segment(number, run, inputs) if watch else run(*inputs)
                for i, x in zip(part.outputs, results, strict=True):
                    values[i] = x
                if part.draws:
                    _advance_draws(part.draws)
                for write in part.writes:
                    write.run(values)
                if part.graph_break is not None:
                    with torch.enable_grad():
                        watch.graph_break(part) if watch else part.graph_break()
            return self._build_result(values, arguments)

    def _build_result(self, values: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Return the result of the step, with each ``Place`` in it replaced by its tensor.

        Lists and dicts in it are new in each call.
        """
        tensors = [place.get(values, arguments) for place in self._places]
        result = replace_instances(self.result, Place, tensors)
        return copy.deepcopy(result) if result is self.result else result

    def messages(self) -> list[OpaqueCall]:
        """Return the messages in which this rank takes part, in order."""
        return [
            self.calls[node.args[1]]
            for part in self.segments
            for node in part.graph.graph.nodes
            if node.target in SENDING_OPS
        ]

    @property
    def bytes(self) -> int:
        """Bytes that this rank sends in a step, without those of the calls at graph breaks."""
        return sum(call.bytes for call in self.messages())


_programs: WeakSet[Program] = WeakSet()


def _forget_shards() -> None:
    """Make all programs drop their references to the memory of shards.

    Called when tensors were moved to other ranks.
    """
    for program in list(_programs):
        for part in program.segments:
            part.forget_shards()


Tracer(on_move=_forget_shards).install()


def _advance_draws(draws: int) -> None:
    state = generator.get_state()
    generator.set_draw_count(torch.default_generator, state.counter + draws)
