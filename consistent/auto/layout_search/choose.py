"""Choosing the layouts of a chain: the least seconds of all that send less than op by op."""

from __future__ import annotations

from ...compiled.layout_search.chain import Chain, Decision, Solution
from ...graph.global_ops import CHOSEN
from ...rules.signature import Call
from ..layouts.figures import figures_of
from ..layouts.problem import Option
from ..layouts.solve import DoesNotFitInMemory, solve
from .problem import problem_of

# By how much of its seconds a choice is to be better, so that no rounding makes one.
_LEAST = 1e-6


def chosen(chain: Chain) -> Solution | str:
    """What each op is to do; or why none does anything else than alone."""
    if chain.why is not None:
        return chain.why
    if not chain.steps:
        return "it has no global ops"
    figures = figures_of(chain.values[0].spec.placement.type)
    problem, alone = problem_of(chain, figures)
    seconds, sent = problem.cost(alone)
    if sent == 0:
        return "nothing is sent between its ops"
    problem.never = 2 * sent
    try:
        solution = solve(problem, sent - 1)
    except DoesNotFitInMemory:
        return f"no other choice sends less than {sent:,} bytes"
    faster, less = problem.cost(solution)
    if less >= sent or faster > seconds * (1 - _LEAST):
        return f"what sends less than {sent:,} bytes is estimated to take longer"
    nodes = problem.nodes[len(problem.nodes) - len(chain.steps) :]
    picked = solution[len(problem.nodes) - len(chain.steps) :]
    decisions = {
        step.number: _decision(step.name, node.options[index], step.call)
        for step, node, index in zip(chain.steps, nodes, picked, strict=True)
        if step.kind == CHOSEN and step.number is not None
    }
    return Solution(decisions, chain.count, (sent, less), (seconds, faster))


def _decision(name: str, option: Option, call: Call) -> Decision:
    shapes = tuple(tuple(o.shape) for o in call.operands)
    return Decision(name, shapes, option.axes)
