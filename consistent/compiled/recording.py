"""Recording of one call of a step, from the search for its state to the finished program."""

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
from .is_compiling import compiling
from .node_place import NodePlace, Writes
from .opaque import OpaqueCall
from .options import CompileOptions
from .passes import PASSES
from .places import Places
from .program import Program, Read
from .rates import Rates, Varying
from .reached import find
from .recorder import Recorder
from .segments import cut, trace_of
from .show import text
from .unsettled import Unsettled


class Recorded:
    """Result of a recording: a program with its guards, or the reason ``why`` there is none."""

    def __init__(
        self, program: Program | None, guards: Guards | None = None, why: str | None = None
    ) -> None:
        self.program, self._guards, self.why = program, guards, why

    @classmethod
    def failed(cls, why: str) -> Recorded:
        """Return a result without a program, for the reason ``why``: the step runs as written."""
        return cls(None, why=why)

    def fits(self, given: Sequence[torch.Tensor]) -> bool:
        """Return whether the program is valid now, with the tensors ``given`` as arguments.

        It is valid if all state that the step can reach is as it was during the recording.
        """
        return self._guards is None or self._guards.holds(given)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the program, and return the result of the step."""
        assert self.program is not None
        return self.program.run(tensors_in((args, kwargs)))

    def __str__(self) -> str:
        return f"not a program: {self.why}" if self.program is None else text(self.program)


class StepSettings(NamedTuple):
    """Settings that all recordings of one compiled step share.

    Args:
        name: name of the step in messages.
        options: the options of ``consistent.compile``.
        backend: function that compiles a segment.
        varying: optimizers that run as written, because their numbers vary from call to call.
    """

    name: str
    options: CompileOptions
    backend: Callable[..., Any]
    varying: Varying


class Around:
    """Hooks that ``record`` calls around a run of the step; those of this base class do nothing.

    The layout search (``layouts="auto"``) overrides them to record global ops, or to choose the
    layouts of the ops.
    """

    def inside(self, is_paused: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context manager in which the step runs.

        While ``is_paused()`` is true, what runs is not recorded.
        """
        return nullcontext()

    def ended(self, kept: Any) -> None:
        """Called after the step has run; ``kept`` has the tensors that it returns or stores."""


def record(
    how: StepSettings,
    step: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    around: Around | None = None,
) -> tuple[Any, Recorded | Unsettled]:
    """Run ``step(*args, **kwargs)`` and record it; return (its result, the recording).

    Either all ranks get a program, or none does. ``Unsettled`` means that the step changed Python
    state, as a first call may, and can be recorded again in its next call.
    """
    made = _Recording(how, step, args, kwargs)
    result = made.run(around or Around())
    return result, made.ended(result)


class _Recording:
    """Recording of one call of a step: call ``run``, then ``ended``.

    It holds the state from before the call, and the objects that record the call.
    """

    def __init__(
        self, how: StepSettings, step: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self._how, self._step, self._args, self._kwargs = how, step, args, kwargs
        self._reached = find(step, (args, kwargs))
        self._given = tensors_in((args, kwargs))
        # Made before the step runs, so that ``_changed`` finds what the step itself changes.
        self._guards = Guards(self._reached.guards, self._reached.sources, self._given)
        self._graded = [x.requires_grad for x in self._given]
        self._calls: dict[int, OpaqueCall] = {}
        self._recorder = Recorder(how.name, self._calls)
        self._places = Places(self._recorder, self._reached)
        if refused := self._reached.refused:
            self._recorder.refuse(f"{refused[0]}.\n  A program would not notice if it changed.")
        for i, x in enumerate(self._given):
            self._recorder.recorded.know(Read("argument", i, x), x)
        self._places.know()
        self._drawn = _drawn_by_python()
        self._rates = Rates(self._reached)
        how.varying.note(self._reached.optimizers)

    def run(self, around: Around) -> Any:
        """Call the step, record it, and return its result."""
        recorder, reached, rates, places = self._recorder, self._reached, self._rates, self._places
        tell_compiling = self._how.options.tell_compiling and recorder.why is None
        try:
            with (
                listening(recorder, reached, rates, places.changes, places.know, self._how.varying),
                rates.watched(),
                recorder.recording(),
                compiling(tell_compiling),
                around.inside(lambda: recorder.is_paused),
            ):
                result = self._step(*self._args, **self._kwargs)
                recorder.check_seeds()
        except Exception as error:
            error.add_note(f"  while {self._how.name} was recorded to be compiled")
            if tell_compiling:
                error.add_note(
                    "  torch.compiler.is_compiling() was true meanwhile. If that is why the step "
                    "came here, call consistent.compile(..., tell_compiling=False)."
                )
            raise
        around.ended([result, *(source.read() for source in reached.sources)])
        return result

    def ended(self, result: Any) -> Recorded | Unsettled:
        """Return the program, if all ranks have recorded the step; otherwise the reason why not.

        Called after ``run``, with the result of the step. This is a collective of the world.
        """
        recorder, name = self._recorder, self._how.name
        changed = self._changed()
        is_unsettled = bool(changed) and recorder.why is None
        writes, shown = ([], None) if is_unsettled else self._given_back(result)
        every = gathered("unsettled" if is_unsettled else recorder.why is None)
        if "unsettled" in every:  # returned on all ranks, so that their counts of tries stay equal
            return Unsettled(changed if is_unsettled else ())
        if not all(every):
            return Recorded.failed(recorder.why or no_program(name))
        trace = trace_of(recorder, writes, shown, self._calls)
        for run in PASSES:
            run(trace, self._how.options)
        program = cut(name, recorder, trace, writes, shown, self._backend())
        return Recorded(program, self._guards)

    def _changed(self) -> list[str]:
        """Return the names of the Python numbers and objects that the step has changed.

        If there are any, the step cannot become a program, which would leave them unchanged.
        """
        more = self._rates.guards(self._recorder.left_to_python)
        self._guards.add(more)
        broken = [each.path for each in [*self._reached.guards, *more] if not each.holds()]
        found = broken + self._rates.written()
        if self._drawn != _drawn_by_python():
            found.append("the state of Python's or numpy's random numbers")
        return found

    def _given_back(self, result: Any) -> tuple[Writes, Any]:
        """Return the assignments at the end of the step, and its result.

        In the result, a ``NodePlace`` stands for each tensor.
        """
        if self._graded != [x.requires_grad for x in self._given]:
            self._recorder.refuse(
                "an argument requires grad after the step and did not before, or reversed."
            )
        writes = self._places.changes()
        shown = map_tensors(result, lambda x: self._places.place_of(x, self._given))
        _check_result(self._recorder, shown)
        return writes, shown

    def _backend(self) -> Callable[..., Any]:
        if not self._how.options.cuda_graph:
            return self._how.backend
        capturer = cuda_graphs.capturer
        return replayed(self._how.backend, capturer, capturer.device)


def _drawn_by_python() -> tuple:
    """Return the states of the random generators of Python and numpy.

    They are compared before and after the step: a program would not draw from them.
    """
    numpy = sys.modules.get("numpy")
    # A program that has not imported numpy cannot draw from it.
    of_numpy = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), *((of_numpy[0].tobytes(), of_numpy[1]) if of_numpy else ())


_PLAIN = (int, float, complex, str, bytes, slice, torch.dtype, torch.device)


def _check_result(recorder: Recorder, value: Any) -> None:
    """Stop recording if the step returns something that a program cannot return.

    A program can return tensors, numbers, strings, and containers of them. ``value`` is the result
    of the step with a ``NodePlace`` for each tensor, or a part of that result.
    """
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
            f"the step returns a {type(value).__name__}, which a program cannot make again.\n"
            "  Return tensors, numbers, lists, tuples, dicts or dataclasses of them."
        )
        return
    for x in value:
        _check_result(recorder, x)
