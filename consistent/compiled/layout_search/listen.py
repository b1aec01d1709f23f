"""Recorder of the ops on global tensors of a step, for the layout search.

A tensor that no recorded op has made, such as a parameter or the result of an op over lists, counts
as an input whose layout is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...dispatch import _C
from ...dispatch.plans.plan import Plan, use_plan_table
from ...dispatch.plans.shards import is_global
from ...graph.global_ops import GlobalOps
from ...spec.nested import tensors_in
from ...spec.tracer import Tracer
from .chain import Chain


@contextmanager
def planning_each_op(tracer: Tracer) -> Iterator[None]:
    """Call the hooks of ``tracer`` for every op on global tensors that runs inside the block.

    A cached plan would skip the choice of layouts. So each op is planned for its own sizes, in a
    temporary table of plans that is discarded afterwards.
    """
    with use_plan_table(_C.PlanTable(True)), tracer.tracing():
        yield


class Listener:
    """Recorder of the ops on global tensors that run while it listens; ``chain`` is the result."""

    def __init__(self) -> None:
        self.chain = Chain()
        self._ops = GlobalOps(self.chain.values)
        self._open_ops: list[tuple[Plan, int]] = []

    @contextmanager
    def listening(self, is_paused: Callable[[], bool]) -> Iterator[None]:
        """Record the ops that run inside the block.

        The layouts of ops that run while ``is_paused()`` are fixed, because these ops are not part
        of the program.
        """
        self._is_paused = is_paused
        tracer = Tracer(
            on_op_begin=self._on_op_begin,
            on_op_end=self._on_op_end,
            on_to_global=self._on_to_global,
            on_layout_read=self._on_layout_read,
        )
        with planning_each_op(tracer):
            yield

    def pin(self, value: Any) -> None:
        """Mark the global tensors in ``value`` as ones whose layout the search must not change.

        Used for tensors whose layout is seen by code outside the recorded ops.
        """
        for x in tensors_in(value):
            if is_global(x):
                self.chain.values[self._ops.number(x)].pinned = True

    # -- what happens ------------------------------------------------------------------------------

    def _on_op_begin(self, plan: Plan) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.chain.why = "backward runs global ops (a checkpoint, a hook)"
        self._open_ops.append((plan, self.chain.count))
        self.chain.count += 1

    def _on_op_end(self, plan: Any, operands: Sequence[Any], out: Any, *_: Any) -> None:
        number = None
        while self._open_ops:
            open_plan, number = self._open_ops.pop()
            if open_plan is plan:
                break
        if self._is_paused():
            self.pin([operands, out])
        elif operands or out is not None:  # not an op over lists
            self._append_op(plan, operands, out, number)

    def _append_op(self, plan: Any, operands: Sequence[Any], out: Any, number: int | None) -> None:
        op = replace(self._ops.op(plan, operands, out), number=number)
        if op.outs:
            self.chain.steps.append(op)

    def _on_to_global(self, x: Any, moved: Any) -> None:
        if moved._spec.placement != x._spec.placement:
            self.pin(x)
            return
        self.chain.steps.append(self._ops.move(x, moved))
        if self._is_paused():
            self.pin([x, moved])

    def _on_layout_read(self, x: Any) -> None:
        self.pin(x)
