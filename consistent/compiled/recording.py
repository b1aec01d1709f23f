"""Recording a step, and running what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..dispatch.plans.shards import is_global
from ..nn.nested import map_tensors, tensors_in
from .errors import CannotRecord
from .live import listening
from .opaque import Call
from .passes import PASSES
from .program import Program, Source
from .recorder import NodePlace, Recorder, Writes, compiling
from .segments import cut
from .show import text
from .state import Slot, State, find
from .unsettled import Unsettled

_Off = torch._C.DisableTorchFunction


class Recorded:
    """A program, and what it was recorded with; or why there is none."""

    def __init__(
        self,
        program: Program | None,
        state: State | None = None,
        empty: Sequence[Slot] = (),
        why: str | None = None,
    ) -> None:
        self.program, self.why = program, why
        self._facts = [] if state is None else state.facts
        self._empty = (
            empty  # gradients that were not there before the step, which did not add to them
        )

    @classmethod
    def failed(cls, why: str) -> Recorded:
        """There is none."""
        return cls(None, why=why)

    def fits(self) -> bool:
        """Whether all that the step can reach is as it was recorded with."""
        if self.program is None:
            return True
        return (
            all(fact.holds() for fact in self._facts)
            and all(slot.read() is None for slot in self._empty)
            and self.program.fits()
        )

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
        whole: raise where the step cannot be a program.
        compiling: what ``torch.compiler.is_compiling()`` says meanwhile.
        backend: makes a callable of a segment.
    """

    name: str
    whole: bool
    compiling: bool
    backend: Callable[..., Any]


def record(
    how: How, step: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, Recorded | Unsettled]:
    """(the result of ``step(*args, **kwargs)``, its program).

    Raises:
        CannotRecord: the step cannot be a program, and is to be a ``whole`` one.
    """
    state = find(step, (args, kwargs))
    calls: dict[int, Call] = {}
    recorder = Recorder(how.name, calls, how.whole)
    given = tensors_in((args, kwargs))
    places = _Places(recorder, state)
    for i, x in enumerate(given):
        recorder.know(Source("argument", i, x), x)
    places.know()
    try:
        with (
            listening(recorder, state, places.changes, places.know),
            recorder.recording(),
            compiling(how.compiling),
        ):
            result = step(*args, **kwargs)
    except CannotRecord:
        raise
    except Exception as error:
        error.add_note(f"  while {how.name} was recorded to be compiled")
        if how.compiling:
            error.add_note(
                "  torch.compiler.is_compiling() was true meanwhile. If that is why the step came "
                "here, call consistent.compile(..., tell_compiling=False)."
            )
        raise
    if recorder.why is not None:
        return result, Recorded.failed(recorder.why)
    changed = [fact.path for fact in state.facts if not fact.holds()]
    if changed:
        return result, Unsettled(changed)
    try:
        writes = places.changes()
        shown = map_tensors(result, lambda x: places.place_of(x, given))
    except CannotRecord as error:
        if how.whole:
            raise
        return result, Recorded.failed(str(error))
    program = cut(how.name, recorder, writes, shown, calls, how.backend, PASSES)
    return result, Recorded(program, state, places.empty)


class _Places:
    """The places of a step's state, and what was in them when last looked."""

    def __init__(self, recorder: Recorder, state: State) -> None:
        self._recorder, self._slots = recorder, state.slots
        self._seen: list[Any] = [None] * len(state.slots)
        self.empty = [slot for slot in state.slots if slot.read() is None]

    def know(self) -> None:
        """Take note of what is there."""
        for i, slot in enumerate(self._slots):
            now = slot.read()
            if now is not self._seen[i] and isinstance(now, torch.Tensor):
                self._recorder.know(Source("slot", slot, now), now)
            self._seen[i] = now

    def changes(self) -> Writes:
        """What was put into places since then."""
        writes = []
        for i, slot in enumerate(self._slots):
            now = slot.read()
            if now is self._seen[i]:
                continue
            self._seen[i] = now
            if now is None:
                writes.append((slot, None))
            elif isinstance(now, torch.Tensor):
                writes.append((slot, self._made(now)))
            else:
                raise CannotRecord(
                    f"{self._recorder.name}: {slot.path} holds a tensor before the step and "
                    f"{type(now).__name__} after it.\n  A program would not change that."
                )
        return writes

    def _made(self, x: Any) -> NodePlace:
        node = self._recorder.node_of(x)
        return NodePlace(node, x._spec if is_global(x) else None)

    def place_of(self, x: Any, given: list[Any]) -> NodePlace:
        """Where a tensor of the result comes from."""
        for i, other in enumerate(given):
            if x is other:
                return NodePlace(None, argument=i)
        for slot, other in zip(self._slots, self._seen, strict=True):
            if x is other:
                return NodePlace(None, slot=slot)
        if x.requires_grad and not self._recorder.ran_backward:
            raise CannotRecord(
                f"{self._recorder.name}: it returns a tensor that requires grad, and runs no "
                "backward.\n  A program keeps no graph.\n  Compile the whole step, with "
                "backward() in it, or call this under torch.no_grad()."
            )
        return self._made(x)
