"""Record the ops that a function calls when ``explain`` runs it on tensors without values, and the
boxings between these ops."""

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


class Followed:
    """What happens while ``explain`` runs a function without values: ops, and boxings between them.

    The plans of ops are made for a rank outside all placements, and are discarded at the end.

    Attributes:
        met: plans of ops, and boxings, in order.
        tracer: observes the function while it is active.

    Args:
        leaves: the parameters. The all-reduces of their gradients in backward are added to ``met``
            too, although a rank outside the placements does not run them.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.met: list[Plan | FollowedBoxing] = []
        self._leaves, self._before = leaves, list[Any]()
        self._depth = 0
        self._new: Plan | None = None
        self.tracer = Tracer(
            on_plan=self._planned,
            on_op_begin=self._begins,
            on_op_end=self._ends,
            on_boxing_begin=self._boxing,
            on_backward=self._backward,
            on_optimizer_step=lambda _: check_mode.calling("optimizer step"),
        )

    def _planned(self, plan: Plan) -> None:
        self.met.append(plan)
        self._new = plan

    def _begins(self, plan: Plan) -> None:
        self._depth += 1
        if plan is not self._new:  # it was planned for an equal call before
            self.met.append(plan)
        self._new = None

    def _ends(self, *_: Any) -> None:
        self._depth -= 1

    def _boxing(self, src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...]) -> None:
        if moves and not self._depth:  # those of an op belong to its plan
            name = "backward" if backward.in_backward() else check_mode.current()
            self.met.append(FollowedBoxing(name, src, dst, moves))

    def _backward(self, begins: bool) -> None:
        now = [(x.grad, None if x.grad is None else x.grad._version) for x in self._leaves]
        if begins:
            self._before = now
            return
        for leaf, old, new in zip(self._leaves, self._before, now, strict=True):
            changed = new[0] is not None and (new[0] is not old[0] or new[1] != old[1])
            src, dst = leaf._spec.dual, leaf._spec.settled
            # A gradient that gets another layout is boxed by itself, and ``_boxing`` has noted it.
            if changed and summed_axes(leaf._spec) and settled_spec(leaf) is dst:
                moves = plan_boxing(src, dst)
                self.met.append(FollowedBoxing("sum of a gradient", src, dst, moves))
