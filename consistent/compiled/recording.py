"""Recording a step, and running what was recorded."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import gathered

from ..spec.nested import map_tensors, tensors_in
from . import cuda_graphs
from .agree import no_program
from .cuda_graphs import replayed
from .graph_breaks import listening
from .guards import Guards
from .opaque import Call
from .options import CompileOptions
from .passes import PASSES
from .places import Places
from .program import Program, Read
from .rates import Rates, Varying
from .reached import find
from .recorder import NodePlace, Recorder, compiling
from .segments import cut, trace_of
from .show import text
from .unsettled import Unsettled


class Recorded:
    """A program, and what it was recorded with; or why there is none."""

    def __init__(
        self, program: Program | None, guards: Guards | None = None, why: str | None = None
    ) -> None:
        self.program, self._guards, self.why = program, guards, why

    @classmethod
    def failed(cls, why: str) -> Recorded:
        """There is none."""
        return cls(None, why=why)

    def fits(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether all that the step can reach is as it was recorded with."""
        return self._guards is None or self._guards.holds(given)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the step."""
        assert self.program is not None
        return self.program.run(tensors_in((args, kwargs)))

    def __str__(self) -> str:
        return f"not a program: {self.why}" if self.program is None else text(self.program)


class How(NamedTuple):
    """How a step is recorded.

    Args:
        name: for messages.
        options: what was asked for.
        backend: makes a callable of a segment.
        varying: optimizers that are called as they are written, because their numbers vary.
    """

    name: str
    options: CompileOptions
    backend: Callable[..., Any]
    varying: Varying


class Around:
    """What is done beside a recording; here nothing."""

    def inside(self, is_paused: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around the step. While ``is_paused()``, what runs is not recorded."""
        return nullcontext()

    def ended(self, kept: Any) -> None:
        """The step has run; it returns or keeps ``kept``."""


def record(
    how: How,
    step: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    around: Around | None = None,
) -> tuple[Any, Recorded | Unsettled]:
    """(the result of ``step(*args, **kwargs)``, its program, or why there is none). There is one on
    all ranks, or on none."""
    options = how.options
    reached = find(step, (args, kwargs))
    given = tensors_in((args, kwargs))
    guards = Guards(reached.guards, reached.sources, given)
    graded = [x.requires_grad for x in given]
    calls: dict[int, Call] = {}
    recorder = Recorder(how.name, calls)
    places = Places(recorder, reached)
    if reached.refused:
        recorder.refuse(f"{reached.refused[0]}.\n  A program would not notice if it changed.")
    for i, x in enumerate(given):
        recorder.know(Read("argument", i, x), x)
    places.know()
    drawn = _drawn_by_python()
    rates, around = Rates(reached), around or Around()
    how.varying.note(reached.optimizers)
    try:
        with (
            listening(recorder, reached, rates, places.changes, places.know, how.varying),
            rates.watched(),
            recorder.recording(),
            compiling(options.tell_compiling),
            around.inside(lambda: recorder.is_paused),
        ):
            result = step(*args, **kwargs)
            recorder.check_seeds()
    except Exception as error:
        error.add_note(f"  while {how.name} was recorded to be compiled")
        if options.tell_compiling:
            error.add_note(
                "  torch.compiler.is_compiling() was true meanwhile. If that is why the step came "
                "here, call consistent.compile(..., tell_compiling=False)."
            )
        raise
    around.ended([result, *(source.read() for source in reached.sources)])
    more = rates.guards(recorder.left_to_python)
    guards.add(more)
    changed = [each.path for each in [*reached.guards, *more] if not each.holds()] + rates.written()
    if drawn != _drawn_by_python():
        changed.append("the state of Python's or numpy's random numbers")
    is_unsettled = bool(changed) and recorder.why is None
    if is_unsettled:
        writes, shown = [], None
    else:
        if graded != [x.requires_grad for x in given]:
            recorder.refuse(
                "an argument requires grad after the step and did not before, or reversed."
            )
        writes = places.changes()
        shown = map_tensors(result, lambda x: places.place_of(x, given))
        _check_result(recorder, shown)
    every = gathered("unsettled" if is_unsettled else recorder.why is None)
    if "unsettled" in every:  # on all ranks alike, so that they go on counting alike
        return result, Unsettled(changed if is_unsettled else ())
    if not all(every):
        return result, Recorded.failed(recorder.why or no_program(how.name))
    trace = trace_of(recorder, writes, shown, calls)
    for run in PASSES:
        run(trace, options)
    backend = how.backend
    if options.cuda_graph:
        backend = replayed(backend, cuda_graphs.capturer, cuda_graphs.capturer.device)
    program = cut(how.name, recorder, trace, writes, shown, backend)
    return result, Recorded(program, guards)


def _drawn_by_python() -> tuple:
    """States of random numbers that are not torch's."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), *((of_numpy[0].tobytes(), of_numpy[1]) if of_numpy else ())


_PLAIN = (int, float, complex, str, bytes, slice, torch.dtype, torch.device)


def _check_result(recorder: Recorder, value: Any) -> None:
    """A result is made anew in each call: of tensors, numbers, words and containers."""
    if isinstance(
        value, NodePlace | int | float | complex | str | bytes | torch.dtype | torch.device
    ):
        return
    if value is None or isinstance(value, slice):
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if not isinstance(value, list | tuple):
        recorder.refuse(
            f"the step returns a {type(value).__name__}, which a program cannot make anew.\n"
            "  Return tensors, numbers, lists, tuples, dicts or dataclasses of them."
        )
        return
    for x in value:
        _check_result(recorder, x)
