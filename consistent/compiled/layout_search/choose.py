"""Choice of the layouts of a recorded step: the fastest choice that sends fewer bytes than the
default, in which each op chooses its layouts alone when it is called ("op by op")."""

from __future__ import annotations

from ...graph.global_ops import CHOSEN
from ...layout_problem.problem import Option
from ...layout_problem.solve import DoesNotFitInMemory, solve
from ...movement.speeds import costs_of_plans
from ...rules.signature import Call
from .chain import Chain, Decision, Solution
from .problem import problem_of

# Fraction by which a choice has to be faster than op by op, so that rounding errors do not count.
_MIN_GAIN = 1e-6


def choose_layouts(chain: Chain) -> Solution | str:
    """Return the layouts for the ops of ``chain`` that send less than if each op chooses alone.

    They must also be estimated to be faster. If there are none, return the reason, as text for the
    program's notes.
    """
    if chain.why is not None:
        return chain.why
    if not chain.steps:
        return "it has no global ops"
    costs = costs_of_plans(chain.values[0].spec.placement.type)
    problem, op_by_op = problem_of(chain, costs)
    seconds, sent = problem.cost(op_by_op)
    if sent == 0:
        return "nothing is sent between its ops"
    problem.forbidden_bytes = 2 * sent
    try:
        # ``nbytes`` of this problem are bytes sent, so the limit demands fewer than op by op.
        solution = solve(problem, sent - 1)
    except DoesNotFitInMemory:
        return f"no other choice sends less than {sent:,} bytes"
    new_seconds, new_sent = problem.cost(solution)
    if new_sent >= sent or new_seconds > seconds * (1 - _MIN_GAIN):
        return f"what sends less than {sent:,} bytes is estimated to take longer"
    nodes = problem.nodes[len(problem.nodes) - len(chain.steps) :]
    option_indices = solution[len(problem.nodes) - len(chain.steps) :]
    decisions = {
        step.number: _make_decision(step.name, node.options[index], step.call)
        for step, node, index in zip(chain.steps, nodes, option_indices, strict=True)
        if step.kind == CHOSEN and step.number is not None
    }
    return Solution(decisions, chain.count, (sent, new_sent), (seconds, new_seconds))


def _make_decision(name: str, option: Option, call: Call) -> Decision:
    shapes = tuple(tuple(o.shape) for o in call.operands)
    return Decision(name, shapes, option.signatures)
