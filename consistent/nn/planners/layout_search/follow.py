"""Estimate of the time and memory of a recorded step under a plan, without running it.

Each op chooses its layouts from those of its operands, by the same code as ``dispatch/planning``
does in a real run. The plan fixes the layouts of parameters, and the boxing where modules are
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....cost_model.model import CostModel
from ....dispatch.plans.arguments import fill
from ....graph.global_ops import INPUT, OP, PARAMETER, Op
from ....layout_problem.build import cost_of_op
from ....layout_problem.costs import boxing_seconds_on
from ....layout_problem.problem import cost_of_boxing
from ....layout_problem.signatures import signature_of_choice
from ....rules.candidates import candidates
from ....rules.choose import Choice, choose
from ....rules.signature import Call, Operand, Signature
from ....spec import B, NdSbp, invalid_cut_reason
from ...plan import Layouts, Nd, Plan
from .options import reducing_seconds, step_seconds
from .program import Enter, Exit, RecordedStep


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of a step under a plan, and bytes that each rank then holds.

    The bytes are those of parameters, gradients, two optimizer tensors of the size of each
    parameter, and the activations that are kept for backward.
    """

    seconds: float
    nbytes: int

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.3f} ms a step, {self.nbytes / 1e6:,.1f} MB a rank"


def follow(program: RecordedStep, costs: CostModel, plan: Plan) -> Estimate:
    """Return the estimated time and memory of a step of ``program`` under ``plan``.

    Args:
        program: the recorded step.
        costs: the seconds of ops and messages on this machine.
        plan: the plan, with names of tensors and modules as in ``program``.

    Raises:
        ValueError: a value cannot be redistributed as the plan says, or a write in place would go
            to a copy of its target.
    """
    return _StepEstimator(program, costs, plan).estimate()


class _StepEstimator:
    """Adds up the seconds and bytes of a recorded step under a plan, event by event."""

    def __init__(self, program: RecordedStep, costs: CostModel, plan: Plan) -> None:
        self.program, self.costs, self.plan = program, costs, plan
        self.seconds, self.nbytes = 0.0, 0
        self.at = -1  # the event that is followed
        self.layout_of: dict[int, NdSbp] = {}  # value -> its layout at this point of the program
        # For each open call: input -> its layout outside.
        self.outer_layouts: list[dict[int, NdSbp]] = []

    def estimate(self) -> Estimate:
        """Go through the whole step, and return its estimate."""
        for index, value in enumerate(self.program.values):
            if value.kind != OP:
                self._add_value(index)
        for at, event in enumerate(self.program.events):
            self.at = at
            if isinstance(event, Op):
                self._add_op(event)
            elif isinstance(event, Enter):
                self._enter_module(event)
            else:
                self._exit_module(event)
        replicated: NdSbp = (B,) * self.program.placement.ndim
        for v in dict.fromkeys([*self.program.losses, *self.program.results]):
            if v in self.program.losses or any(e.is_partial for e in self.layout_of[v]):
                self._add_boxing(v, replicated, v not in self.program.losses)
        return Estimate(self.seconds, self.nbytes)

    def _add_value(self, index: int) -> None:
        """Add what an input, parameter or buffer costs, and set its layout."""
        value = self.program.values[index]
        replicated: NdSbp = (B,) * self.program.placement.ndim
        self.layout_of[index] = value.fixed or replicated
        layouts = self.plan.layouts(value.name) if value.name else None
        if layouts is None or value.kind != PARAMETER:
            if layouts is not None:
                self.layout_of[index] = layouts.sbp
            layouts = Layouts(self.layout_of[index])
        lies, used, grad, step = (
            value.spec.with_sbp(sbp)
            for sbp in (layouts.sbp, layouts.use, layouts.grad, layouts.step)
        )
        self.nbytes += 0 if value.kind == INPUT else lies.largest_nbytes  # inputs are the user's
        if value.kind != PARAMETER:
            return
        self.layout_of[index] = layouts.use
        # A parameter is boxed to its layout for use at each op that reads it.
        readers = sum(index in op.ins for op in self.program.ops)
        self.seconds += readers * boxing_seconds_on(self.costs, lies, used)
        if value.tracked:
            if layouts.use != layouts.sbp:  # not kept, so gathered again in backward
                self.seconds += readers * boxing_seconds_on(self.costs, lies, used)
            self.seconds += reducing_seconds(self.program, self.costs, used.dual, grad)
            self.seconds += reducing_seconds(self.program, self.costs, step, lies)
            self.seconds += step_seconds(self.costs, step.largest_nbytes)
            self.nbytes += grad.largest_nbytes + 2 * step.largest_nbytes

    # -- calls of modules --------------------------------------------------------------------------

    def _enter_module(self, event: Enter) -> None:
        """Redistribute the arguments of a module call as the plan says."""
        border = self.plan.border(event.module)
        inputs = border.inputs if border else {}
        self.outer_layouts.append({})
        for key, v in event.arguments.items():
            if (nd := inputs.get(key)) is not None:
                self.outer_layouts[-1].setdefault(v, self.layout_of[v])
                self._box_at_border(v, nd)

    def _exit_module(self, event: Exit) -> None:
        """Redistribute the results of a module call as the plan says."""
        border = self.plan.border(event.module)
        outputs: Mapping[int | str, Nd] = border.outputs if border else {}
        # A boxed input is boxed inside the call only; outside it keeps its layout.
        self.layout_of.update(self.outer_layouts.pop())
        for place, (key, v) in enumerate(event.results.items()):
            if (nd := outputs.get(key, outputs.get(place))) is not None:
                self._box_at_border(v, nd)

    def _box_at_border(self, v: int, nd: Nd) -> None:
        """Redistribute the value ``v`` to ``nd``, in which None keeps the layout along an axis."""
        target = tuple(
            old if new is None else new for old, new in zip(self.layout_of[v], nd, strict=True)
        )
        value = self.program.values[v]
        if fault := invalid_cut_reason(target, value.spec.placement, value.spec.shape):
            raise ValueError(f"best_plan: a value cannot be laid out as a plan says: {fault}.")
        if target != self.layout_of[v] and self.program.memory.is_written_after(v, self.at):
            raise _writes_copy_error()
        self._add_boxing(v, target, value.tracked)
        self.layout_of[v] = target

    def _add_boxing(self, v: int, target: NdSbp, backward: bool) -> None:
        """Add what it costs to redistribute the value ``v`` to ``target``.

        With ``backward``, also what it costs to redistribute its gradient in backward.
        """
        cost = cost_of_boxing(
            self.costs, self.program.values[v].spec, self.layout_of[v], target, backward
        )
        self.seconds, self.nbytes = self.seconds + cost[0], self.nbytes + cost[1]

    # -- ops ---------------------------------------------------------------------------------------

    def _add_op(self, op: Op) -> None:
        """Add what an op costs in the layouts that it will choose, and set its results' layouts."""
        values = self.program.values
        replicated: NdSbp = (B,) * self.program.placement.ndim
        choice, sent = self._choose_layouts(op)
        if choice is None:
            ins, outs = [replicated] * len(op.ins), [replicated] * len(op.outs)
        else:
            ins, outs = list(choice.ins), list(choice.outs)
        if op.view and ins[0] != self.layout_of[op.ins[0]]:
            if self.program.memory.must_stay(op, self.at):
                raise _writes_copy_error()
        for v, target in zip(op.ins, ins, strict=True):
            self._add_boxing(v, target, values[v].tracked)
        cost = cost_of_op(self.costs, values, op, (ins, outs), sent)
        self.seconds, self.nbytes = self.seconds + cost[0], self.nbytes + cost[1]
        for v, sbp in zip(op.outs, outs, strict=True):
            self.layout_of[v] = sbp
        if op.call.inplace and choice is None:  # computed on a copy, which is boxed back
            self._add_boxing(op.outs[0], self.layout_of[op.ins[0]], values[op.outs[0]].tracked)
            self.layout_of[op.outs[0]] = self.layout_of[op.ins[0]]

    def _choose_layouts(self, op: Op) -> tuple[Choice | None, Sequence[int]]:
        """Return the layouts that an op will choose in a run, and the bytes that it sends itself.

        The bytes are those that its local code sends along each placement axis, in addition to the
        redistribution of its operands. The layouts are None if all operands have to be replicated.
        """
        if op.row is None:
            return None, ()
        specs = [self.program.values[v].spec.with_sbp(self.layout_of[v]) for v in op.ins]
        call = _with_specs(op.call, specs)
        by_axis = candidates(op.row, call, self.program.placement)
        if by_axis is None:
            return None, ()
        choice = choose(call, specs, by_axis, specs[0].sbp if call.inplace else None)
        return choice, () if choice is None else _bytes_sent(choice, by_axis)


def _writes_copy_error() -> ValueError:
    return ValueError(
        "best_plan: a write in place would go to a copy of its target, which is boxed before.\n"
        "  Compute a new tensor instead, such as x = x + 1 for x += 1."
    )


def _with_specs(call: Call, specs: Sequence) -> Call:
    """Return ``call`` with other specs of its operands."""
    operands = tuple(Operand(i, spec) for i, spec in enumerate(specs))
    args, kwargs = fill(call.args, operands), fill(dict(call.kwargs), operands)
    return replace(call, args=args, kwargs=kwargs, operands=operands)


def _bytes_sent(choice: Choice, by_axis: Sequence[Sequence[Signature]]) -> list[int]:
    """Return the bytes that an op's local code sends, for each placement axis.

    Args:
        choice: the chosen layouts.
        by_axis: for each axis, the signatures that were possible.
    """
    signatures = (
        signature_of_choice(axis, choice, options) for axis, options in enumerate(by_axis)
    )
    return [0 if signature is None else signature.nbytes for signature in signatures]
