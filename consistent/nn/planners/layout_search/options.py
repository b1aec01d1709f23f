"""Conversion of a recorded step to an integer program that chooses its layouts.

Each node has the possible layouts of an input, parameter or op, by the rule of the op.

A parameter may be replicated (B) or split (S), and so may an input, which can be loaded in any
layout; an input that the step writes in place, and a buffer, are replicated. A result of the step
is never a partial sum.

With several placement axes, an option fixes the layouts on all of them, so that the cheapest
redistribution over two axes together can be found. Where there are too many such options, axes are
solved one after the other, each with the current choices of the others, until no axis improves
(``search.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....cost_model.model import CostModel
from ....graph.global_ops import INPUT, OP, PARAMETER, Op, Value
from ....layout_problem.build import cheapest, joint, op_options
from ....layout_problem.costs import boxing_seconds_on, start_seconds
from ....layout_problem.problem import Node, Option, Problem
from ....layout_problem.signatures import layouts_of, may_be
from ....rules.candidates import candidates
from ....rules.signature import Signature
from ....spec import B, NdSbp, Placement, Split, TensorSpec
from .blocks import keys
from .program import RecordedStep

# Tensors of a parameter's size that Adam training holds: the parameter, its gradient and two more.
# A step reads four and writes three.
_KEPT, _STEP = 4, 7
Axes = Sequence[Sequence[Signature]]


def problem_of(
    program: RecordedStep, costs: CostModel, given: Sequence[Axes] | None = None
) -> Problem:
    """Return the integer program of choosing all layouts of ``program``.

    Its nodes are inputs, parameters, buffers, ops and results; an option of a node is a choice of
    layouts for its operands and results.

    Args:
        program: the recorded step.
        costs: the seconds of ops and messages on this machine.
        given: for each node and placement axis, the signatures (layouts of operands and results)
            from which it may choose; None allows all that the rule of its op has.
    """
    problem = Problem(costs)
    axes = given or axes_of(program)
    alike = keys(program)
    stay = {id(op): program.memory.must_stay(op, at) for at, op in program.timed_ops}
    for index, (value, op) in enumerate(_nodes(program)):
        chosen = joint(axes[index])
        if op is None:
            assert value is not None
            options = [_given(program, value, costs, s) for s in chosen]
            node = Node(program.values[value].name, cheapest(options), (), (value,))
        else:
            options = op_options(problem, program.values, op, chosen)
            # An op without a rule writes a copy, which it boxes back.
            in_place = stay[id(op)] and not (op.row is None and op.call.inplace)
            node = Node(op.name, options, op.ins, op.outs, in_place=in_place)
        node.alike = alike[index]
        problem.add(node, program.values)
    _end(problem, program)
    return problem


def axes_of(program: RecordedStep) -> list[Axes]:
    """Return, for each node and placement axis, the signatures from which it may choose.

    A signature has the layouts of an op's operands and results along one axis.
    """
    found: list[Axes] = []
    for value, op in _nodes(program):
        if op is not None:
            found.append(_signatures(op, program.placement))
        else:
            assert value is not None
            written = program.memory.is_written_after(value, -1)
            found.append(_splits(program.values[value], program.placement, written))
    return found


def _nodes(program: RecordedStep) -> Iterable[tuple[int | None, Op | None]]:
    """Yield the nodes in the order of the problem, without its results.

    First (value, None) for each input, parameter and buffer, then (None, op) for each op.
    """
    for index, value in enumerate(program.values):
        if value.kind != OP:
            yield index, None
    for op in program.ops:
        yield None, op


def _splits(value: Value, placement: Placement, written: bool) -> Axes:
    """Return the layouts that an input, parameter or buffer may have, for each placement axis.

    Each layout is a signature without operands: ``Signature((), (S(0),))``.

    Args:
        value: the input, parameter or buffer.
        placement: the placement of the step.
        written: whether the step writes to it in place. Such an input stays replicated, since the
            caller's tensor is written.
    """
    made = []
    for axis, parts in enumerate(placement.shape):
        if value.fixed is not None:
            entries = [value.fixed[axis]]
        elif value.kind == PARAMETER or (value.kind == INPUT and not written):
            dims = [d for d, n in enumerate(value.spec.shape) if n >= parts > 1]
            entries = [B, *map(Split, dims)]
        else:
            entries = [B]
        made.append([Signature((), (entry,)) for entry in entries])
    return made


def _signatures(op: Op, placement: Placement) -> Axes:
    """Return the signatures that the search may choose for an op, for each placement axis.

    They are those of the op's rule, without any that leaves some rank without data, and without
    partial maxima, which have no gradient.
    """
    whole = [[op.call.whole()]] * placement.ndim
    if op.row is None or any(out.data_dependent for out in op.call.outs):
        return whole
    found = candidates(op.row, op.call, placement)
    if found is None:
        return whole
    made = []
    for options, parts in zip(found, placement.shape, strict=True):
        kept = [s for s in dict.fromkeys(options) if may_be(s, op.call, parts)]
        made.append(kept or [op.call.whole()])
    return made


def _given(
    program: RecordedStep, index: int, costs: CostModel, chosen: Sequence[Signature]
) -> Option:
    """Return the option that gives an input, parameter or buffer the layouts ``chosen``.

    The cost of a parameter includes reducing its gradient and the optimizer's step.
    """
    outs = layouts_of(chosen)[1]
    value = program.values[index]
    spec = value.spec.with_sbp(outs[0])
    nbytes = 0 if value.kind == INPUT else spec.largest_nbytes
    seconds = 0.0
    if value.kind == PARAMETER and value.tracked:
        seconds = reducing_seconds(program, costs, spec.dual, spec)
        seconds += step_seconds(costs, nbytes)
        nbytes *= _KEPT
    return Option((), outs, seconds, nbytes, tuple(chosen))


def reducing_seconds(
    program: RecordedStep, costs: CostModel, src: TensorSpec, dst: TensorSpec
) -> float:
    """Return the seconds of redistributing a parameter's gradient from ``src`` to ``dst``.

    Gradients of several parameters are sent in one message, so one latency is divided by the number
    of parameters. The same holds for new values of parameters after an optimizer step.

    Args:
        program: the recorded step, whose parameters share the latency.
        costs: the seconds of messages on this machine.
        src: the spec in which backward computes the gradient, or that of the optimizer step.
        dst: the spec in which the gradient or the parameter is stored.
    """
    seconds = boxing_seconds_on(costs, src, dst)
    start = start_seconds(costs, src, dst)
    if seconds <= start:
        return seconds
    count = sum(v.kind == PARAMETER and v.tracked for v in program.values)
    return seconds - start + start / count


def step_seconds(costs: CostModel, nbytes: int) -> float:
    """Return the seconds of an optimizer step on ``nbytes`` of a parameter on each rank.

    Four tensors of this size are read and three are written, as by Adam.
    """
    return _STEP * nbytes / costs.memory


def _end(problem: Problem, program: RecordedStep) -> None:
    """Add a node for each result of the step, by which it is redistributed to its final layout.

    Losses must be replicated, because the user reads their values; other results may stay split.
    """
    whole: NdSbp = (B,) * program.placement.ndim
    for v in dict.fromkeys([*program.losses, *program.results]):
        layouts, back = [whole], v not in program.losses and program.values[v].tracked
        if v not in program.losses:
            maker, have = problem.made[v]
            found = (option.outs[have] for option in problem.nodes[maker].options)
            layouts += [s for s in found if not any(e.is_partial for e in s)]
        options = [Option((sbp,), (), 0.0, 0) for sbp in dict.fromkeys(layouts)]
        problem.add(Node("result", options, (v,)), program.values, [back])
