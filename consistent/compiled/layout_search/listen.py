"""Noting the global ops of a step while it is recorded.

A value is known by its Python object. Its memory would not do: what is a part of another memory on
one rank may be a copy on another. A tensor that is not known, such as a parameter or what an op
over lists made, has the layout that it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...dispatch import _C
from ...dispatch.plans.plan import Plan, looked_up_in
from ...dispatch.plans.shards import is_global
from ...dispatch.running.on_shards import InPlaceOnCopy
from ...dispatch.running.views import is_view
from ...rules import table
from ...spec.nested import tensors_in
from ...spec.tracer import Tracer
from .chain import CHOSEN, MOVE, ON_COPY, WHOLE, Chain, Step, Value


@contextmanager
def planned_each(tracer: Tracer) -> Iterator[None]:
    """Inside, ``tracer`` sees ops, each of which is planned by its own sizes; the plans are
    forgotten after."""
    with looked_up_in(_C.PlanTable(True)), tracer.tracing():
        yield


class Listener:
    """Makes the chain of what runs while it listens."""

    def __init__(self) -> None:
        self.chain = Chain()
        self._objects: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._open: list[tuple[Plan, int]] = []

    @contextmanager
    def listening(self, is_paused: Callable[[], bool]) -> Iterator[None]:
        """Inside, ops come here; those that run while ``is_paused()`` keep their layouts."""
        self._is_paused = is_paused
        tracer = Tracer(
            on_op_begin=self._started,
            on_op_end=self._ran,
            on_to_global=self._moved,
            on_layout_read=self._read,
        )
        with planned_each(tracer):
            yield

    def pin(self, value: Any) -> None:
        """The layouts of the tensors in ``value`` are not to be chosen."""
        for x in tensors_in(value):
            if is_global(x):
                self.chain.values[self._value(x)].pinned = True

    # -- what happens ------------------------------------------------------------------------------

    def _started(self, plan: Plan) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.chain.why = "backward runs global ops (a checkpoint, a hook)"
        self._open.append((plan, self.chain.count))
        self.chain.count += 1

    def _ran(self, plan: Any, given: Sequence[Any], out: Any, *_: Any) -> None:
        number = None
        while self._open:
            met, number = self._open.pop()
            if met is plan:
                break
        given = [x for x in given if is_global(x)]
        ins = tuple(map(self._value, given))
        if self._is_paused():
            self.pin([*given, *tensors_in(out)])
            return
        made = given[:1] if plan.inplace else [x for x in tensors_in(out) if is_global(x)]
        # contiguous() gives its operand itself on some ranks, and a copy on others.
        outs = tuple(map(self._new, made))
        tracked = tuple(bool(x.requires_grad) and torch.is_grad_enabled() for x in given)
        kind, row = WHOLE, table.find(plan.name)
        if isinstance(plan, InPlaceOnCopy):
            kind = ON_COPY
        elif not plan.is_whole and row is not None and len(plan.call.outs) == len(outs):
            kind = CHOSEN
        view = not plan.inplace and bool(plan.call.args) and is_view(plan)
        if not outs:
            return
        self.chain.steps.append(
            Step(plan.name, kind, plan.call, row, ins, outs, tracked, view, number)
        )

    def _moved(self, x: Any, made: Any) -> None:
        read = self._value(x)
        if made._spec.placement != x._spec.placement:
            self.chain.values[read].pinned = True
            return
        tracked = (bool(x.requires_grad) and torch.is_grad_enabled(),)
        outs = (self._new(made),)
        self.chain.steps.append(
            Step("to_global", MOVE, None, None, (read,), outs, tracked, True, None)
        )
        if self._is_paused():
            self.pin([x, made])

    def _read(self, x: Any) -> None:
        self.chain.values[self._value(x)].pinned = True

    # -- values ------------------------------------------------------------------------------------

    def _value(self, x: Any) -> int:
        known = self._objects.get(id(x))
        if known is None or known[0]() is not x:
            return self._new(x)
        return known[1] if self.chain.values[known[1]].spec is x._spec else self._new(x)

    def _new(self, x: Any) -> int:
        self.chain.values.append(Value(x._spec))
        number = len(self.chain.values) - 1
        self._objects[id(x)] = weakref.ref(x), number
        return number
