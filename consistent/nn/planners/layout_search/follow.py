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
from ....layout_problem.problem import box
from ....layout_problem.signatures import chosen_on
from ....rules.candidates import candidates
from ....rules.choose import Choice, choose
from ....rules.signature import Call, Operand, Signature
from ....spec import B, NdSbp, cut_fault
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
    return _Following(program, costs, plan).all()


class _Following:
    """Adds up the seconds and bytes of a recorded step under a plan, event by event."""

    def __init__(self, program: RecordedStep, costs: CostModel, plan: Plan) -> None:
        self.program, self.costs, self.plan = program, costs, plan
        self.seconds, self.nbytes = 0.0, 0
        self.at = -1  # the event that is followed
        self.now: dict[int, NdSbp] = {}  # value -> its layout at this point of the program
        self.before: list[dict[int, NdSbp]] = []  # for each open call: input -> layout outside

    def all(self) -> Estimate:
        """Go through the whole step, and return its estimate."""
        for index, value in enumerate(self.program.values):
            if value.kind != OP:
                self._given(index)
        for at, event in enumerate(self.program.events):
            self.at = at
            if isinstance(event, Op):
                self._op(event)
            elif isinstance(event, Enter):
                self._enter(event)
            else:
                self._exit(event)
        whole: NdSbp = (B,) * self.program.placement.ndim
        for v in dict.fromkeys([*self.program.losses, *self.program.results]):
            if v in self.program.losses or any(e.is_partial for e in self.now[v]):
                self._box(v, whole, v not in self.program.losses)
        return Estimate(self.seconds, self.nbytes)

    def _given(self, index: int) -> None:
        """Add what an input, parameter or buffer costs, and set its layout."""
        value = self.program.values[index]
        whole: NdSbp = (B,) * self.program.placement.ndim
        self.now[index] = value.fixed or whole
        found = self.plan.layouts(value.name) if value.name else None
        if found is None or value.kind != PARAMETER:
            if found is not None:
                self.now[index] = found.sbp
            found = Layouts(self.now[index])
        lies, used, grad, step = (
            value.spec.with_sbp(sbp) for sbp in (found.sbp, found.use, found.grad, found.step)
        )
        self.nbytes += 0 if value.kind == INPUT else lies.largest_nbytes  # inputs are the user's
        if value.kind != PARAMETER:
            return
        self.now[index] = found.use
        # A parameter is boxed to its layout for use at each op that reads it.
        readers = sum(index in op.ins for op in self.program.ops)
        self.seconds += readers * boxing_seconds_on(self.costs, lies, used)
        if value.tracked:
            if found.use != found.sbp:  # not kept, so gathered again in backward
                self.seconds += readers * boxing_seconds_on(self.costs, lies, used)
            self.seconds += reducing_seconds(self.program, self.costs, used.dual, grad)
            self.seconds += reducing_seconds(self.program, self.costs, step, lies)
            self.seconds += step_seconds(self.costs, step.largest_nbytes)
            self.nbytes += grad.largest_nbytes + 2 * step.largest_nbytes

    # -- calls of modules --------------------------------------------------------------------------

    def _enter(self, event: Enter) -> None:
        """Redistribute the arguments of a module call as the plan says."""
        border = self.plan.border(event.module)
        ways = border.inputs if border else {}
        self.before.append({})
        for key, v in event.given.items():
            if (nd := ways.get(key)) is not None:
                self.before[-1].setdefault(v, self.now[v])
                self._border(v, nd)

    def _exit(self, event: Exit) -> None:
        """Redistribute the results of a module call as the plan says."""
        border = self.plan.border(event.module)
        ways: Mapping[int | str, Nd] = border.outputs if border else {}
        # A boxed input is boxed inside the call only; outside it keeps its layout.
        self.now.update(self.before.pop())
        for place, (key, v) in enumerate(event.given.items()):
            if (nd := ways.get(key, ways.get(place))) is not None:
                self._border(v, nd)

    def _border(self, v: int, nd: Nd) -> None:
        """Redistribute the value ``v`` to ``nd``, in which None keeps the layout along an axis."""
        want = tuple(h if w is None else w for h, w in zip(self.now[v], nd, strict=True))
        value = self.program.values[v]
        if fault := cut_fault(want, value.spec.placement, value.spec.shape):
            raise ValueError(f"best_plan: a value cannot be laid out as a plan says: {fault}.")
        if want != self.now[v] and self.program.memory.is_written_after(v, self.at):
            raise _writes_copy()
        self._box(v, want, value.tracked)
        self.now[v] = want

    def _box(self, v: int, want: NdSbp, back: bool) -> None:
        """Add what it costs to redistribute the value ``v`` to ``want``.

        With ``back``, also what it costs to redistribute its gradient in backward.
        """
        more = box(self.costs, self.program.values[v].spec, self.now[v], want, back)
        self.seconds, self.nbytes = self.seconds + more[0], self.nbytes + more[1]

    # -- ops ---------------------------------------------------------------------------------------

    def _op(self, op: Op) -> None:
        """Add what an op costs in the layouts that it will choose, and set its results' layouts."""
        values = self.program.values
        whole: NdSbp = (B,) * self.program.placement.ndim
        choice, sent = self._choice(op)
        if choice is None:
            ins, outs = [whole] * len(op.ins), [whole] * len(op.outs)
        else:
            ins, outs = list(choice.ins), list(choice.outs)
        if op.view and ins[0] != self.now[op.ins[0]]:
            if self.program.memory.must_stay(op, self.at):
                raise _writes_copy()
        for v, want in zip(op.ins, ins, strict=True):
            self._box(v, want, values[v].tracked)
        more = cost_of_op(self.costs, values, op, (ins, outs), sent)
        self.seconds, self.nbytes = self.seconds + more[0], self.nbytes + more[1]
        for v, sbp in zip(op.outs, outs, strict=True):
            self.now[v] = sbp
        if op.call.inplace and choice is None:  # computed on a copy, which is boxed back
            self._box(op.outs[0], self.now[op.ins[0]], values[op.outs[0]].tracked)
            self.now[op.outs[0]] = self.now[op.ins[0]]

    def _choice(self, op: Op) -> tuple[Choice | None, Sequence[int]]:
        """Return the layouts that an op will choose in a run, and the bytes that it sends itself.

        The bytes are those that its local code sends along each placement axis, beside the
        redistribution of its operands. The layouts are None if all operands have to be replicated.
        """
        if op.row is None:
            return None, ()
        specs = [self.program.values[v].spec.with_sbp(self.now[v]) for v in op.ins]
        call = _with_specs(op.call, specs)
        by_axis = candidates(op.row, call, self.program.placement)
        if by_axis is None:
            return None, ()
        choice = choose(call, specs, by_axis, specs[0].sbp if call.inplace else None)
        return choice, () if choice is None else _sent(choice, by_axis)


def _writes_copy() -> ValueError:
    return ValueError(
        "best_plan: a write in place would go to a copy of its target, which is boxed before.\n"
        "  Compute a new tensor instead, such as x = x + 1 for x += 1."
    )


def _with_specs(call: Call, specs: Sequence) -> Call:
    """Return ``call`` with other specs of its operands."""
    operands = tuple(Operand(i, spec) for i, spec in enumerate(specs))
    args, kwargs = fill(call.args, operands), fill(dict(call.kwargs), operands)
    return replace(call, args=args, kwargs=kwargs, operands=operands)


def _sent(choice: Choice, by_axis: Sequence[Sequence[Signature]]) -> list[int]:
    """Return the bytes that an op's local code sends, for each placement axis.

    Args:
        choice: the chosen layouts.
        by_axis: for each axis, the signatures that were possible.
    """
    found = (chosen_on(axis, choice, options) for axis, options in enumerate(by_axis))
    return [0 if signature is None else signature.nbytes for signature in found]
