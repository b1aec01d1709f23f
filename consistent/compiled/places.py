"""Tracking of the attributes, gradients and other places that hold the tensors of a step, while it
is recorded."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from .memory import has_memory, storage_of
from .node_place import NodePlace, Writes
from .program import Read
from .reached import ReachableState
from .recorder import Recorder


class Places:
    """Record of what each ``Source`` of a step held when it was last checked.

    A ``Source`` is an attribute, a dict entry, ``param.grad`` or the like that holds a tensor.
    Comparison with what it holds later shows which of them the step has assigned; a program repeats
    these assignments.
    """

    def __init__(self, recorder: Recorder, reached: ReachableState) -> None:
        self._recorder, self._sources = recorder, reached.sources
        self._last_values: list[Any] = [None] * len(reached.sources)
        self._memories: list[Any] = [None] * len(reached.sources)

    def note_sources(self) -> None:
        """Note what each source holds, and register these tensors as inputs at the recorder.

        Called before the step runs, and after each graph break.
        """
        for i, source in enumerate(self._sources):
            value = source.read()
            if isinstance(value, torch.Tensor):
                memory = storage_of(value) if has_memory(value) else None
                if value is not self._last_values[i] or memory != self._memories[i]:
                    self._recorder.recorded.add_input(Read("source", source, value), value)
                self._memories[i] = memory
            self._last_values[i] = value

    def changes(self) -> Writes:
        """Return the assignments since the last check, as (source, origin of the assigned tensor).

        Called at each graph break and at the end of the step. A change that a program cannot
        repeat, such as ``x.data = ...``, makes the recorder give up the program.
        """
        writes = []
        for i, source in enumerate(self._sources):
            value = source.read()
            if value is self._last_values[i]:
                if isinstance(value, torch.Tensor) and has_memory(value):
                    if storage_of(value) != self._memories[i]:
                        self._recorder.give_up(
                            f"{source.path} was given other memory (x.data = ...).\n"
                            "  Write into it: x.data.copy_(...)."
                        )
                continue
            self._last_values[i] = value
            if value is None:
                writes.append((source, None))
            elif isinstance(value, torch.Tensor):
                self._memories[i] = storage_of(value) if has_memory(value) else None
                # The source holds another tensor object; writes into the same object are recorded
                # as ops.
                writes.append((source, self._place_of_value(value)))
            else:
                self._recorder.give_up(
                    f"{source.path} holds a tensor before the step and {type(value).__name__} "
                    "after it."
                )
        return writes

    def _place_of_value(self, x: Any) -> NodePlace:
        node = self._recorder.node_or_none(x)
        return NodePlace(node, x._spec if is_global(x) else None)

    def place_of(self, x: Any, given: list[Any]) -> NodePlace:
        """Return where a program gets the tensor ``x`` from, which the step returns.

        That is one of the arguments ``given``, a source that holds it, or a recorded value.
        """
        for i, tensor in enumerate(given):
            if x is tensor:
                return NodePlace(None, argument=i)
        for source, tensor in zip(self._sources, self._last_values, strict=True):
            if x is tensor:
                return NodePlace(None, source=source)
        if x.requires_grad and not self._recorder.ran_backward:
            self._recorder.give_up(
                "the step returns a tensor that requires grad, and runs no backward.\n"
                "  A program keeps no graph.\n  Compile the whole step, with backward() in it, or "
                "call this under torch.no_grad()."
            )
        return self._place_of_value(x)
