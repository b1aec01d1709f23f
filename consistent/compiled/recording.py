"""Recording a step, and running what was recorded."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..dispatch.plans.shards import is_global
from ..nn.nested import map_tensors, tensors_in
from . import cuda_graphs
from .agree import gathered, no_program
from .cuda_graphs import replayed
from .live import listening
from .opaque import Call
from .options import CompileOptions
from .passes import PASSES
from .places import Places
from .program import Program, Source
from .rates import Rates, Varying
from .recorder import NodePlace, Recorder, compiling
from .segments import cut, trace_of
from .show import text
from .state import Fact, State, find, same_value
from .unsettled import Unsettled

_Off = torch._C.DisableTorchFunction
_T = torch.Tensor
_device = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_ABSENT: Any = object()


class Recorded:
    """A program, and what it was recorded with; or why there is none."""

    def __init__(
        self, program: Program | None, before: Before | None = None, why: str | None = None
    ) -> None:
        self.program, self._before, self.why = program, before, why

    @classmethod
    def failed(cls, why: str) -> Recorded:
        """There is none."""
        return cls(None, why=why)

    def fits(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether all that the step can reach is as it was recorded with."""
        return self._before is None or self._before.holds(given)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the step."""
        assert self.program is not None
        return self.program.run(tensors_in((args, kwargs)))

    def __str__(self) -> str:
        return f"not a program: {self.why}" if self.program is None else text(self.program)


class Before:
    """What was there before a step. It is compared before each run, in as few calls as can be."""

    def __init__(self, state: State, given: Sequence[torch.Tensor]) -> None:
        self._slots = state.slots
        tensors = self._now()
        with _Off():
            self._likes = [_like(x) for x in tensors]
            self._shared = _sharing([*tensors, *given])
        self._in_dicts: list[tuple[dict, Any, Any]] = []
        self._others: list[Fact] = []
        self.add(state.facts)

    def add(self, facts: Sequence[Fact]) -> None:
        """Compare these, too."""
        for fact in facts:
            if type(fact.store) is dict and not fact.is_asked:
                self._in_dicts.append((fact.store, fact.key, fact.value))
            else:
                self._others.append(fact)

    def holds(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether facts are the same, slots hold tensors like those, and share memory as those."""
        for store, key, value in self._in_dicts:
            now = store.get(key, _ABSENT)
            if now is not value and not same_value(now, value):
                return False
        if not all(fact.holds() for fact in self._others):
            return False
        tensors = self._now()
        with _Off():
            for x, like in zip(tensors, self._likes):
                if _like(x) != like:
                    return False
            return _sharing([*tensors, *given]) == self._shared

    def _now(self) -> list[Any]:
        return [slot.read() for slot in self._slots]


def _sharing(tensors: list[Any]) -> list[int]:
    """Of each slot and argument, the first one that lies in the same memory."""
    first: dict[int, int] = {}
    found = []
    for i, x in enumerate(tensors):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            found.append(first.setdefault(_T.untyped_storage(x)._cdata, i))
        else:
            found.append(-1)
    return found


def _like(x: Any) -> Any:
    """The kind of a slot's tensor: its layout, its size, and whether it requires grad."""
    if not isinstance(x, torch.Tensor):
        return None
    if x.layout is not torch.strided:
        return x.layout, x.shape, x.requires_grad
    spec = x._spec if is_global(x) else None  # type: ignore[attr-defined]
    return spec, _T.size(x), _T.stride(x), x.requires_grad, x.dtype, _device(x), x.grad_fn is None


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
    state = find(step, (args, kwargs))
    given = tensors_in((args, kwargs))
    before, graded = Before(state, given), [x.requires_grad for x in given]
    calls: dict[int, Call] = {}
    recorder = Recorder(how.name, calls)
    places = Places(recorder, state)
    if state.refused:
        recorder.refuse(f"{state.refused[0]}.\n  A program would not notice if it changed.")
    for i, x in enumerate(given):
        recorder.know(Source("argument", i, x), x)
    places.know()
    drawn = _drawn_by_python()
    rates, around = Rates(state), around or Around()
    how.varying.note(state.optimizers)
    try:
        with (
            listening(recorder, state, rates, places.changes, places.know, how.varying),
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
    around.ended([result, *(slot.read() for slot in state.slots)])
    more = rates.facts(recorder.live_objects)
    before.add(more)
    changed = [fact.path for fact in [*state.facts, *more] if not fact.holds()] + rates.written()
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
    return result, Recorded(program, before)


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
