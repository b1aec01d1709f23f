"""Layout problem of a recorded step whose costs are seconds and bytes sent.

Each node may take these layouts:

```
input of the step               only its present layout
op                              the SBP signatures of its rule that keep pinned results' layouts
to_global() in the step         only the layout that the program requests
```

A result is pinned if the program sees it, so that its layout must not change. Bytes are those that
the busiest rank sends: for each boxing in forward, and for the boxing of its gradient in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...boxing.plan import boxing_bytes
from ...cost_model.model import CostModel
from ...graph.global_ops import CHOSEN, MOVE, Op
from ...layout_problem.build import op_options, signature_combinations
from ...layout_problem.costs import boxing_seconds_on
from ...layout_problem.problem import Edge, Node, Option, Problem
from ...layout_problem.shared_memory import AliasedValues
from ...layout_problem.signatures import is_searchable, layouts_of, signature_of_choice
from ...rules.candidates import candidates
from ...rules.choose import choose
from ...rules.signature import Signature
from ...spec import B, NdSbp
from .chain import Chain


class ChainProblem(Problem):
    """Layout problem that limits the bytes that a rank sends, instead of those that it holds.

    ``counted_bytes`` returns the bytes to which the limit applies: here those sent, in the base
    class those kept.
    """

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs)
        self.forbidden_bytes = 0  # bytes of an impossible boxing

    def counted_bytes(self, kept: int, sent: int) -> int:
        return sent

    def boxing(self, edge: Edge, source_sbp: NdSbp, target_sbp: NdSbp) -> tuple[float, int]:
        """Return (seconds, bytes sent) of boxing the value of ``edge`` between two layouts.

        The boxing of its gradient in backward is included. An impossible boxing gets costs so high
        that no solution contains it.
        """
        if source_sbp == target_sbp:
            return 0.0, 0
        if edge.operand == 0 and self.nodes[edge.reader].in_place:
            return self.forbidden_seconds, self.forbidden_bytes
        source, target = edge.spec.with_sbp(source_sbp), edge.spec.with_sbp(target_sbp)
        boxings = [(source, target)] + [(target.dual, source.dual)] * edge.tracked
        try:
            seconds = sum(boxing_seconds_on(self.costs, a, b) for a, b in boxings)
            return seconds, sum(boxing_bytes(a, b) for a, b in boxings)
        except ValueError:  # there is no such boxing, such as from a maximum to a sum
            return self.forbidden_seconds, self.forbidden_bytes


def problem_of(chain: Chain, costs: CostModel) -> tuple[ChainProblem, list[int]]:
    """Return the layout problem of ``chain``, and its solution if each op chooses alone.

    A solution is the index of an option for each node. The nodes are the inputs of the step, then
    the ops of ``chain.steps``, in order.
    """
    problem, op_by_op = ChainProblem(costs), list[int]()
    memory = AliasedValues(enumerate(chain.steps))
    outs = {v for step in chain.steps for v in step.outs}
    for v, value in enumerate(chain.values):
        if v not in outs:
            problem.add(
                Node("given", [_fixed_option((), [value.spec.sbp])], (), (v,)), chain.values
            )
            op_by_op.append(0)
    for position, step in enumerate(chain.steps):
        options, index = _options(problem, chain, step)
        node = Node(
            step.name, options, step.ins, step.outs, in_place=memory.must_stay(step, position)
        )
        problem.add(node, chain.values, step.tracked)
        op_by_op.append(index)
    return problem, op_by_op


def _options(problem: Problem, chain: Chain, step: Op) -> tuple[list[Option], int]:
    """Return (the options of one op, index of the one that it takes when it chooses alone)."""
    outs = [chain.values[v].spec.sbp for v in step.outs]
    if step.kind == MOVE:
        return [_fixed_option(outs, outs)], 0
    if step.kind != CHOSEN:
        replicated: NdSbp = (B,) * len(outs[0])
        input_layouts: list[NdSbp] = [replicated] * len(step.ins)
        if step.call.inplace:
            input_layouts[0] = outs[0]
        return [_fixed_option(input_layouts, outs)], 0
    base, axes = _signatures(step)
    pinned = [i for i, v in enumerate(step.outs) if chain.values[v].pinned]
    allowed = [
        chosen
        for chosen in signature_combinations(axes, around=base)
        # A pinned result is a value that the program sees, so its layout must not change.
        if all(s.outs[i] is b.outs[i] for s, b in zip(chosen, base) for i in pinned)
    ]
    options = op_options(problem, chain.values, step, allowed)
    op_by_op = layouts_of(base)
    if all((option.ins, option.outs) != op_by_op for option in options):
        # The op-by-op choice is always possible, even where the filters above leave it out.
        options.append(Option(*op_by_op, 0.0, sum(s.nbytes for s in base), tuple(base)))
    return options, [(option.ins, option.outs) for option in options].index(op_by_op)


def _fixed_option(ins: Sequence[NdSbp], outs: Sequence[NdSbp]) -> Option:
    return Option(tuple(ins), tuple(outs), 0.0, 0)


def _signatures(step: Op) -> tuple[list[Signature], list[list[Signature]]]:
    """Return (SBP signatures that the op takes when it chooses alone, all possible SBP signatures).

    Both are lists with an entry for each placement axis.
    """
    call, row = step.call, step.row
    assert row is not None
    specs = [o.spec for o in call.operands]
    by_axis = candidates(row, call, specs[0].placement)
    assert by_axis is not None
    choice = choose(call, specs, by_axis, specs[0].sbp if call.inplace else None)
    assert choice is not None
    chosen_by_axis = [signature_of_choice(a, choice, options) for a, options in enumerate(by_axis)]
    base = [signature for signature in chosen_by_axis if signature is not None]
    if any(out.data_dependent for out in call.outs):
        return base, [[s] for s in base]
    return base, [
        [s for s in dict.fromkeys([own, *options]) if s == own or is_searchable(s, call, parts)]
        for own, options, parts in zip(base, by_axis, specs[0].placement.shape, strict=True)
    ]
