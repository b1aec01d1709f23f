"""``best_plan()``: the layouts of a step with the least estimated time within a rank's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....cost_model.model import CostModel
from ....layout_problem.problem import Problem
from ....layout_problem.solve import DoesNotFitInMemory, solve
from ....movement.speeds import costs_of_plans
from ....rules.signature import Signature
from ....spec import Placement
from ....spec.nested import arguments_of, instances_in
from ...plan import Plan
from ...slots import plain_slots
from ..resolve import resolve
from .candidates import broadcast_plan, estimate_plans, named_plans
from .emit import plan_of_solution
from .follow import Estimate, follow
from .options import possible_signatures, problem_of
from .program import RecordedStep
from .record import record

# The most options of a problem of several axes that is solved for all axes at once.
_MAX_OPTIONS_AT_ONCE = 300
_MAX_ROUNDS = 3


def best_plan(
    step_or_model: Callable[..., Any],
    placement: Placement,
    example: Any,
    memory: int | None = None,
    *,
    machine: CostModel | None = None,
) -> Plan:
    """Return the plan under which a step of a model is estimated to take the least time.

    ```
    plan = best_plan(model, placement, batch)
    plan = best_plan(step, placement, (model, x, y), memory=80 * 2**30)
    model = consistent.parallelize(model, placement, plan, inputs=B)
    ```

    The step is run once without values: nothing is computed or sent, and ``model`` and its
    gradients stay as they are. Ranks with equal examples find equal plans, without communication.

    The notes of the plan contain the estimates.

    Args:
        step_or_model: a module, called as ``model(*example)``; or a function of a module and a
            batch, which may call backward. Leave the optimizer's step out: two tensors of the size
            of each parameter are counted for it.
        placement: placement of the model. Its ranks need not exist yet.
        example: the arguments: a tuple, a mapping of keywords, or one tensor. Only sizes are used,
            except that the step may read the values of integers and masks among them; if it reads
            none, tensors on ``meta`` will do. A global tensor keeps its layout. For others the
            entry of the model itself in the plan (``plan.modules[""]``) says in which layout they
            should come, and ``inputs=`` of ``parallelize`` makes them global.
        memory: bytes that a rank may hold.
        machine: the machine of the ranks; by default that of this world, with links as measured, or
            the machine that is simulated.

    Raises:
        ImportError: scipy is not installed.
        ValueError: there is not exactly one module, it is parallelized already, the step reads
            values, or no plan fits in ``memory``.
    """
    args, kwargs = arguments_of(example)
    model = _model_of(step_or_model, args, kwargs)
    program = record(step_or_model, model, placement, args, kwargs)
    costs = machine or costs_of_plans(placement.type)
    solutions = _solve(program, costs, memory)
    least = min(nbytes for _, _, nbytes in solutions.values())
    # A run may choose otherwise than the solution, so every plan is estimated by ``follow``.
    makers: dict[str, Callable[[], Plan]] = {
        name: partial(_plan_from_solution, program, model, solution, problem)
        for name, (solution, problem, _) in solutions.items()
    }
    makers.update(named_plans(program, model))
    plans, estimates = estimate_plans(program, costs, makers)
    if not plans:
        plans = {"whole": broadcast_plan(program, model)}
        estimates = {name: follow(program, costs, plan) for name, plan in plans.items()}
    fitting = {n: e for n, e in estimates.items() if memory is None or e.nbytes <= memory}
    if not fitting:
        raise _no_fit_error(
            min([least, *(e.nbytes for e in estimates.values())]), memory or 0, model
        )
    best = min(fitting, key=lambda name: fitting[name].seconds)  # the first of equal ones
    plan = plans[best]
    plan.notes += _plan_notes(best, estimates)
    return plan


# -- the model -------------------------------------------------------------------------------------


def _model_of(step: Any, args: tuple, kwargs: Mapping[str, Any]) -> torch.nn.Module:
    """Return the one module among a step and its arguments.

    Raises:
        ValueError: there is not exactly one, or it is parallelized already.
    """
    candidates = [step] if isinstance(step, torch.nn.Module) else []
    candidates += instances_in((args, dict(kwargs)), torch.nn.Module)
    modules = list({id(m): m for m in candidates}.values())
    if len(modules) != 1:
        names = ", ".join(type(m).__name__ for m in modules) or "none"
        raise ValueError(
            f"best_plan: a plan is for one module, and the step is given {len(modules)}: {names}.\n"
            "  Give the model itself, or a step and its arguments with the model among them: "
            "best_plan(step, placement, (model, x, y))."
        )
    (model,) = modules
    if "_consistent_plan" in model.__dict__:
        raise ValueError(
            f"best_plan: this {type(model).__name__} is parallelized already, and a plan is "
            "searched for a module as it was built.\n"
            "  Build it again, on meta if it is large: with torch.device('meta'): Model()."
        )
    return model


# -- the search ------------------------------------------------------------------------------------


# A solution, the problem that it solves, and the bytes that a rank then holds.
_Solution = tuple[list[int], Problem, int]


def _solve(program: RecordedStep, costs: CostModel, memory: int | None) -> dict[str, _Solution]:
    """Return name -> a solution of the layout problem, from which a plan of that name is made.

    There is one if the problem can be solved for all axes at once; otherwise there are one or two,
    of which either may be the better. If nothing fits in ``memory``, each is the one with the
    fewest bytes.
    """
    axes, name = possible_signatures(program), "a plan of its own"
    counts = (math.prod(map(len, each)) for each in axes)
    if program.placement.ndim == 1 or sum(counts) <= _MAX_OPTIONS_AT_ONCE:
        problem = problem_of(program, costs, axes)
        solution = _solve_within_memory(problem, memory)
        return {name: (solution, problem, problem.cost(solution)[1])}
    replicated = [[options[0] for options in each] for each in axes]  # replicated first
    solutions = {name: _solve_axis_by_axis(program, costs, memory, replicated)}
    if costs.inside != costs.between:
        # With unequal links, solving axis by axis may stop at a bad solution. So it is also begun
        # from the solution for equal links.
        equal_solution = _solve_axis_by_axis(
            program, replace(costs, between=costs.inside), memory, replicated
        )
        second_solution = _solve_axis_by_axis(
            program, costs, memory, _chosen_signatures(equal_solution, len(axes))
        )
        solutions[f"{name}, begun with equal links"] = second_solution
    return solutions


def _solve_axis_by_axis(
    program: RecordedStep,
    costs: CostModel,
    memory: int | None,
    signatures: Sequence[Sequence[Signature]],
) -> _Solution:
    """Return a solution found by solving one axis after another, until a round improves nothing.

    The choices on the other axes are fixed meanwhile. Used where there are too many options for all
    axes together.

    Args:
        program: the recorded step.
        costs: the seconds of ops and messages on this machine.
        memory: the bytes that a rank may hold; None for no limit.
        signatures: where to begin: for each node, its signature on each axis.
    """
    axes = possible_signatures(program)
    best: _Solution | None = None
    last_score: tuple[bool, float] = False, float("inf")
    for _ in range(_MAX_ROUNDS):
        for axis in range(program.placement.ndim):
            options_of_axes = [
                [options if a == axis else [now[a]] for a, options in enumerate(each)]
                for each, now in zip(axes, signatures, strict=True)
            ]
            problem = problem_of(program, costs, options_of_axes)
            solution = _solve_within_memory(problem, memory)
            best = solution, problem, problem.cost(solution)[1]
            signatures = _chosen_signatures(best, len(axes))
        assert best is not None
        seconds, nbytes = best[1].cost(best[0])
        # Compared as a tuple: fitting in memory comes before seconds.
        score = memory is not None and nbytes > memory, seconds
        if score >= last_score:
            break
        last_score = score
    assert best is not None
    return best


def _chosen_signatures(found_solution: _Solution, count: int) -> list[Sequence[Signature]]:
    """Return the signatures of the first ``count`` nodes in a solution, one for each axis."""
    solution, problem, _ = found_solution
    pairs = zip(problem.nodes, solution, range(count))
    return [node.options[index].signatures for node, index, _ in pairs]


def _plan_from_solution(
    program: RecordedStep, model: torch.nn.Module, solution: Sequence[int], problem: Problem
) -> Plan:
    """Return the plan under which a run comes closest to a solution, without patterns."""
    plan = plan_of_solution(program, problem, solution)
    return resolve(model, plain_slots(model), program.placement, plan)


def _solve_within_memory(problem: Problem, memory: int | None) -> list[int]:
    """Return the best solution within ``memory``, or the one with the fewest bytes if none fits."""
    try:
        return solve(problem, memory)
    except DoesNotFitInMemory as error:
        return error.solution


# -- notes and errors ------------------------------------------------------------------------------


def _plan_notes(best: str, estimates: Mapping[str, Estimate]) -> list[str]:
    """Return the notes of the plan ``best``: its estimate, and those of the four next best."""
    others = sorted((e.seconds, name) for name, e in estimates.items() if name != best)
    text = "; ".join(f"{name}: {estimates[name].seconds * 1e3:.3f} ms" for _, name in others[:4])
    return [
        f"searched: {best}, estimated {estimates[best]}; others: {text}",
        "give inputs= to parallelize, so that the model's inputs become global tensors",
    ]


def _no_fit_error(least: int, memory: int, model: torch.nn.Module) -> ValueError:
    return ValueError(
        f"best_plan: no plan of this {type(model).__name__} fits in memory={memory:,} bytes a "
        f"rank.\n  The smallest that was found holds {least:,} bytes, {least - memory:,} too many: "
        "parameters, gradients, two more tensors for the optimizer, and what forward keeps for "
        "backward.\n  Take more ranks, a smaller batch, or checkpoint activations."
    )
