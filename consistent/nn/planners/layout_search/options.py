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
from ....layout_problem.build import cheapest_options, op_options, signature_combinations
from ....layout_problem.costs import boxing_seconds_on, start_seconds
from ....layout_problem.problem import Node, Option, Problem
from ....layout_problem.signatures import is_searchable, layouts_of
from ....rules.candidates import candidates
from ....rules.signature import Signature
from ....spec import B, NdSbp, Placement, Split, TensorSpec
from .blocks import node_block_keys
from .program import RecordedStep

# Tensors of a parameter's size that Adam training holds: the parameter, its gradient and two more.
# A step reads four and writes three.
_TENSORS_KEPT, _TENSORS_STEPPED = 4, 7
AxisSignatures = Sequence[Sequence[Signature]]


def problem_of(
    program: RecordedStep, costs: CostModel, signatures: Sequence[AxisSignatures] | None = None
) -> Problem:
    """Return the integer program of choosing all layouts of ``program``.

    Its nodes are inputs, parameters, buffers, ops and results; an option of a node is a choice of
    layouts for its operands and results.

    Args:
        program: the recorded step.
        costs: the seconds of ops and messages on this machine.
        signatures: for each node and placement axis, the signatures (layouts of operands and
            results) from which it may choose; None allows all that the rule of its op has.
    """
    problem = Problem(costs)
    axes = signatures or possible_signatures(program)
    block_keys = node_block_keys(program)
    must_stay = {id(op): program.memory.must_stay(op, at) for at, op in program.timed_ops}
    for index, (value, op) in enumerate(_nodes(program)):
        choices = signature_combinations(axes[index])
        if op is None:
            assert value is not None
            options = [_value_option(program, value, costs, s) for s in choices]
            node = Node(program.values[value].name, cheapest_options(options), (), (value,))
        else:
            options = op_options(problem, program.values, op, choices)
            # An op without a rule writes a copy, which it boxes back.
            in_place = must_stay[id(op)] and not (op.row is None and op.call.inplace)
            node = Node(op.name, options, op.ins, op.outs, in_place=in_place)
        node.block_key = block_keys[index]
        problem.add(node, program.values)
    _add_results(problem, program)
    return problem


def possible_signatures(program: RecordedStep) -> list[AxisSignatures]:
    """Return, for each node and placement axis, the signatures from which it may choose.

    A signature has the layouts of an op's operands and results along one axis.
    """
    axes: list[AxisSignatures] = []
    for value, op in _nodes(program):
        if op is not None:
            axes.append(_possible_signatures(op, program.placement))
        else:
            assert value is not None
            written = program.memory.is_written_after(value, -1)
            axes.append(_possible_splits(program.values[value], program.placement, written))
    return axes


def _nodes(program: RecordedStep) -> Iterable[tuple[int | None, Op | None]]:
    """Yield the nodes in the order of the problem, without its results.

    First (value, None) for each input, parameter and buffer, then (None, op) for each op.
    """
    for index, value in enumerate(program.values):
        if value.kind != OP:
            yield index, None
    for op in program.ops:
        yield None, op


def _possible_splits(value: Value, placement: Placement, written: bool) -> AxisSignatures:
    """Return the layouts that an input, parameter or buffer may have, for each placement axis.

    Each layout is a signature without operands: ``Signature((), (S(0),))``.

    Args:
        value: the input, parameter or buffer.
        placement: the placement of the step.
        written: whether the step writes to it in place. Such an input stays replicated, since the
            caller's tensor is written.
    """
    splits = []
    for axis, parts in enumerate(placement.shape):
        if value.fixed is not None:
            entries = [value.fixed[axis]]
        elif value.kind == PARAMETER or (value.kind == INPUT and not written):
            dims = [d for d, n in enumerate(value.spec.shape) if n >= parts > 1]
            entries = [B, *map(Split, dims)]
        else:
            entries = [B]
        splits.append([Signature((), (entry,)) for entry in entries])
    return splits


def _possible_signatures(op: Op, placement: Placement) -> AxisSignatures:
    """Return the signatures that the search may choose for an op, for each placement axis.

    They are those of the op's rule, without any that leaves some rank without data, and without
    partial maxima, which have no gradient.
    """
    replicated = [[op.call.broadcast_signature()]] * placement.ndim
    if op.row is None or any(out.data_dependent for out in op.call.outs):
        return replicated
    by_axis = candidates(op.row, op.call, placement)
    if by_axis is None:
        return replicated
    signatures = []
    for options, parts in zip(by_axis, placement.shape, strict=True):
        useful_options = [s for s in dict.fromkeys(options) if is_searchable(s, op.call, parts)]
        signatures.append(useful_options or [op.call.broadcast_signature()])
    return signatures


def _value_option(
    program: RecordedStep, index: int, costs: CostModel, signatures: Sequence[Signature]
) -> Option:
    """Return the option that gives an input, parameter or buffer the layouts of ``signatures``.

    The cost of a parameter includes reducing its gradient and the optimizer's step.
    """
    outs = layouts_of(signatures)[1]
    value = program.values[index]
    spec = value.spec.with_sbp(outs[0])
    nbytes = 0 if value.kind == INPUT else spec.largest_nbytes
    seconds = 0.0
    if value.kind == PARAMETER and value.tracked:
        seconds = reducing_seconds(program, costs, spec.dual, spec)
        seconds += step_seconds(costs, nbytes)
        nbytes *= _TENSORS_KEPT
    return Option((), outs, seconds, nbytes, tuple(signatures))


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
    return _TENSORS_STEPPED * nbytes / costs.memory


def _add_results(problem: Problem, program: RecordedStep) -> None:
    """Add a node for each result of the step, by which it is redistributed to its final layout.

    Losses must be replicated, because the user reads their values; other results may stay split.
    """
    replicated: NdSbp = (B,) * program.placement.ndim
    for v in dict.fromkeys([*program.losses, *program.results]):
        layouts, back = [replicated], v not in program.losses and program.values[v].tracked
        if v not in program.losses:
            maker, output = problem.makers[v]
            maker_layouts = (option.outs[output] for option in problem.nodes[maker].options)
            layouts += [s for s in maker_layouts if not any(e.is_partial for e in s)]
        options = [Option((sbp,), (), 0.0, 0) for sbp in dict.fromkeys(layouts)]
        problem.add(Node("result", options, (v,)), program.values, [back])
