"""Record the ops and boxings of a function that ``explain`` runs on tensors without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..autograd import backward
from ..boxing.plan import plan as plan_boxing
from ..boxing.steps import Step
from ..dispatch.plans.gradients import settled_spec, summed_axes
from ..dispatch.plans.plan import Plan
from ..movement import check_mode
from ..spec import TensorSpec
from ..spec.tracer import Tracer


class FollowedBoxing(NamedTuple):
    """A boxing that belongs to no op: what it is for, the specs before and after, and its moves."""

    name: str
    src: TensorSpec
    dst: TensorSpec
    moves: tuple[Step, ...]


class FollowedCall:
    """Record of what ``explain`` observes while it runs a function: ops, and boxings between them.

    The plans of ops are made for a rank outside all placements, and are discarded at the end.

    Attributes:
        events: plans of ops, and boxings, in order.
        tracer: observes the function while it is active.

    Args:
        leaves: the parameters. The all-reduces of their gradients in backward are added to
            ``events`` too, although a rank outside the placements does not run them.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.events: list[Plan | FollowedBoxing] = []
        self._leaves, self._grads_before = leaves, list[Any]()
        self._depth = 0
        self._unstarted_plan: Plan | None = None
        self.tracer = Tracer(
            on_plan=self._on_plan,
            on_op_begin=self._on_op_begin,
            on_op_end=self._on_op_end,
            on_boxing_begin=self._on_boxing_begin,
            on_backward=self._on_backward,
            on_optimizer_step=lambda _: check_mode.set_current_op("optimizer step"),
        )

    def _on_plan(self, plan: Plan) -> None:
        self.events.append(plan)
        self._unstarted_plan = plan

    def _on_op_begin(self, plan: Plan) -> None:
        self._depth += 1
        if plan is not self._unstarted_plan:  # it was planned for an equal call before
            self.events.append(plan)
        self._unstarted_plan = None

    def _on_op_end(self, *_: Any) -> None:
        self._depth -= 1

    def _on_boxing_begin(self, src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...]) -> None:
        if moves and not self._depth:  # those of an op belong to its plan
            name = "backward" if backward.in_backward() else check_mode.current_op()
            self.events.append(FollowedBoxing(name, src, dst, moves))

    def _on_backward(self, begins: bool) -> None:
        grads = [(x.grad, None if x.grad is None else x.grad._version) for x in self._leaves]
        if begins:
            self._grads_before = grads
            return
        for leaf, old, new in zip(self._leaves, self._grads_before, grads, strict=True):
            changed = new[0] is not None and (new[0] is not old[0] or new[1] != old[1])
            src, dst = leaf._spec.dual, leaf._spec.settled
            # A gradient that gets another layout is boxed by itself, noted by ``_on_boxing_begin``.
            if changed and summed_axes(leaf._spec) and settled_spec(leaf) is dst:
                moves = plan_boxing(src, dst)
                self.events.append(FollowedBoxing("sum of a gradient", src, dst, moves))
