"""Execution of a step in which each op takes the layouts that were chosen for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...rules.choose import Choice, choice_of
from ...rules.signature import Call, Signature
from ...spec import NdSbp, TensorSpec
from ...spec.tracer import Tracer
from .chain import Decision, Solution
from .listen import planning_each_op


class Follower:
    """Gives the ops of a step the layouts of ``solution``, in the order in which the ops start.

    If an op differs from the op for which its layouts were chosen, this op and all later ones
    choose their own layouts, and ``is_followed`` is false.
    """

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self._op_count = 0
        self._last_decided = -1  # number of the last op whose decision was applied
        self._has_diverged = False

    @property
    def is_followed(self) -> bool:
        """Return whether all ops took the layouts that were decided for them."""
        return not self._has_diverged and self._op_count == self._solution.count

    @contextmanager
    def following(self) -> Iterator[None]:
        """Apply the solution's choices of SBP signatures to the ops inside the ``with`` block."""
        with planning_each_op(Tracer(on_op_begin=self._count_op, choose=self._decide)):
            yield

    def _count_op(self, _: Any) -> None:
        # ``choose`` is called before ``on_op_begin``, so a decision for this op would be applied by
        # now.
        if self._op_count in self._solution.decisions and self._last_decided != self._op_count:
            self._has_diverged = True
        self._op_count += 1

    def _decide(
        self,
        call: Call,
        specs: Sequence[TensorSpec],
        by_axis: Sequence[Sequence[Signature]],
        pin: NdSbp | None,
    ) -> Choice | None:
        decision = self._solution.decisions.get(self._op_count)
        if decision is None or self._has_diverged:
            return None
        if not _decision_applies(decision, call, specs, by_axis, pin):
            return None
        self._last_decided = self._op_count
        return choice_of(call, specs, decision.axes)


def _decision_applies(
    decision: Decision,
    call: Call,
    specs: Sequence[TensorSpec],
    by_axis: Sequence[Sequence[Signature]],
    pin: NdSbp | None,
) -> bool:
    if decision.name != call.name or decision.shapes != tuple(tuple(s.shape) for s in specs):
        return False
    if any(s not in options for s, options in zip(decision.axes, by_axis, strict=True)):
        return False
    input_sbp = tuple(s.ins[0] for s in decision.axes)
    return pin is None or (
        input_sbp == pin and input_sbp == tuple(s.outs[0] for s in decision.axes)
    )
