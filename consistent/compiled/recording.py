"""Recording of one call of a step, from the search for its state to the finished program."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import gather_from_ranks

from ..spec.nested import map_tensors, tensors_in
from . import cuda_graphs
from .agree import no_program_reason
from .cuda_graphs import replaying_backend
from .graph_breaks import intercept_optimizers
from .guards import Guards
from .is_compiling import compiling
from .node_place import NodePlace, Writes
from .opaque import OpaqueCall
from .options import CompileOptions
from .passes import PASSES
from .places import Places
from .program import Program, Read
from .rates import Rates, Varying
from .reached import find_reachable_state
from .recorder import Recorder
from .segments import build_program, trace_of
from .show import program_text
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
        return f"not a program: {self.why}" if self.program is None else program_text(self.program)


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


class RecordingHooks:
    """Hooks that ``record`` calls around a run of the step; those of this base class do nothing.

    The layout search (``layouts="auto"``) overrides them to record global ops, or to choose the
    layouts of the ops.
    """

    def context(self, is_paused: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context manager in which the step runs.

        While ``is_paused()`` is true, what runs is not recorded.
        """
        return nullcontext()

    def on_end(self, tensors: Any) -> None:
        """Called after the step has run; ``tensors`` are those that it returns or stores."""


def record(
    settings: StepSettings,
    step: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    hooks: RecordingHooks | None = None,
) -> tuple[Any, Recorded | Unsettled]:
    """Run ``step(*args, **kwargs)`` and record it; return (its result, the recording).

    Either all ranks get a program, or none does. ``Unsettled`` means that the step changed Python
    state, as a first call may, and can be recorded again in its next call.
    """
    recording = _Recording(settings, step, args, kwargs)
    result = recording.run(hooks or RecordingHooks())
    return result, recording.finish(result)


class _Recording:
    """Recording of one call of a step: call ``run``, then ``finish``.

    It holds the state from before the call, and the objects that record the call.
    """

    def __init__(
        self, settings: StepSettings, step: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self._settings, self._step, self._args, self._kwargs = settings, step, args, kwargs
        self._reached = find_reachable_state(step, (args, kwargs))
        self._tensors = tensors_in((args, kwargs))
        # Made before the step runs, so that ``_changed_state`` finds what the step itself changes.
        self._guards = Guards(self._reached.guards, self._reached.sources, self._tensors)
        self._required_grad = [x.requires_grad for x in self._tensors]
        self._calls: dict[int, OpaqueCall] = {}
        self._recorder = Recorder(settings.name, self._calls)
        self._places = Places(self._recorder, self._reached)
        if refusals := self._reached.refusals:
            self._recorder.give_up(f"{refusals[0]}.\n  A program would not notice if it changed.")
        for i, x in enumerate(self._tensors):
            self._recorder.recorded.add_input(Read("argument", i, x), x)
        self._places.note_sources()
        self._python_rng_before = _python_rng_state()
        self._rates = Rates(self._reached)
        settings.varying.note(self._reached.optimizers)

    def run(self, hooks: RecordingHooks) -> Any:
        """Call the step, record it, and return its result."""
        recorder, reached, rates, places = self._recorder, self._reached, self._rates, self._places
        tell_compiling = self._settings.options.tell_compiling and recorder.why is None
        try:
            with (
                intercept_optimizers(
                    recorder,
                    reached,
                    rates,
                    places.changes,
                    places.note_sources,
                    self._settings.varying,
                ),
                rates.tracking(),
                recorder.recording(),
                compiling(tell_compiling),
                hooks.context(lambda: recorder.is_paused),
            ):
                result = self._step(*self._args, **self._kwargs)
                recorder.check_seeds()
        except Exception as error:
            error.add_note(f"  while {self._settings.name} was recorded to be compiled")
            if tell_compiling:
                error.add_note(
                    "  torch.compiler.is_compiling() was true meanwhile. If that is why the step "
                    "came here, call consistent.compile(..., tell_compiling=False)."
                )
            raise
        hooks.on_end([result, *(source.read() for source in reached.sources)])
        return result

    def finish(self, result: Any) -> Recorded | Unsettled:
        """Return the program, if all ranks have recorded the step; otherwise the reason why not.

        Called after ``run``, with the result of the step. This is a collective of the world.
        """
        recorder, name = self._recorder, self._settings.name
        changed = self._changed_state()
        is_unsettled = bool(changed) and recorder.why is None
        writes, result_places = ([], None) if is_unsettled else self._writes_and_result(result)
        outcomes = gather_from_ranks("unsettled" if is_unsettled else recorder.why is None)
        # Returned on all ranks, so that their counts of tries stay equal.
        if "unsettled" in outcomes:
            return Unsettled(changed if is_unsettled else ())
        if not all(outcomes):
            return Recorded.failed(recorder.why or no_program_reason(name))
        trace = trace_of(recorder, writes, result_places, self._calls)
        for run_pass in PASSES:
            run_pass(trace, self._settings.options)
        program = build_program(name, recorder, trace, writes, result_places, self._backend())
        return Recorded(program, self._guards)

    def _changed_state(self) -> list[str]:
        """Return the names of the Python numbers and objects that the step has changed.

        If there are any, the step cannot become a program, which would leave them unchanged.
        """
        rate_guards = self._rates.guards(self._recorder.unrecorded_owners)
        self._guards.add(rate_guards)
        changed_paths = [
            guard.path for guard in [*self._reached.guards, *rate_guards] if not guard.holds()
        ]
        changes = changed_paths + self._rates.changed_numbers()
        if self._python_rng_before != _python_rng_state():
            changes.append("the state of Python's or numpy's random numbers")
        return changes

    def _writes_and_result(self, result: Any) -> tuple[Writes, Any]:
        """Return the assignments at the end of the step, and its result.

        In the result, a ``NodePlace`` stands for each tensor.
        """
        if self._required_grad != [x.requires_grad for x in self._tensors]:
            self._recorder.give_up(
                "an argument requires grad after the step and did not before, or reversed."
            )
        writes = self._places.changes()
        result_places = map_tensors(result, lambda x: self._places.place_of(x, self._tensors))
        _check_result(self._recorder, result_places)
        return writes, result_places

    def _backend(self) -> Callable[..., Any]:
        if not self._settings.options.cuda_graph:
            return self._settings.backend
        capturer = cuda_graphs.capturer
        return replaying_backend(self._settings.backend, capturer, capturer.device)


def _python_rng_state() -> tuple:
    """Return the states of the random generators of Python and numpy.

    They are compared before and after the step: a program would not draw from them.
    """
    numpy = sys.modules.get("numpy")
    # A program that has not imported numpy cannot draw from it.
    numpy_state = () if numpy is None else numpy.random.get_state()[1:3]
    return random.getstate(), *((numpy_state[0].tobytes(), numpy_state[1]) if numpy_state else ())


_PLAIN_TYPES = (int, float, complex, str, bytes, slice, torch.dtype, torch.device)


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
        recorder.give_up(
            f"the step returns a {type(value).__name__}, which a program cannot make again.\n"
            "  Return tensors, numbers, lists, tuples, dicts or dataclasses of them."
        )
        return
    for x in value:
        _check_result(recorder, x)
