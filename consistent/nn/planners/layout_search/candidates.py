"""The plans that a search chooses from, and the estimated time of a step under each.

A plan that cannot be made for the model, or that a run could not follow, is left out. An example is
"tensor" on both of two placement axes: a fused projection of queries, keys and values is split in
custom parts along one axis, and cannot be split again along the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from ....cost_model.model import CostModel
from ....spec import B, S
from ...plan import Border, Plan
from ...slots import plain_slots
from ..registry import axis_names, plan_for
from ..resolve import resolve
from .follow import Estimate, follow
from .program import Enter, RecordedStep

# The plans by name that a found plan is compared with, and the layouts of their inputs.
_NAMED_PLANS = {"data": S(0), "zero3": S(0), "tensor": B, "tensor+sequence": B}


def estimate_plans(
    program: RecordedStep, costs: CostModel, makers: Mapping[str, Callable[[], Plan]]
) -> tuple[dict[str, Plan], dict[str, Estimate]]:
    """Return the plans that a run can follow, and the estimate of a step under each, by name.

    Args:
        program: the recorded step.
        costs: the seconds of ops and messages on this machine.
        makers: name -> a function that makes the plan. A plan that raises ValueError is left out.
    """
    plans, estimates = dict[str, Plan](), dict[str, Estimate]()
    for name, make in makers.items():
        try:
            plan = make()
            estimates[name] = follow(program, costs, plan)
        except ValueError:
            continue
        plans[name] = plan
    return plans, estimates


def broadcast_plan(program: RecordedStep, model: torch.nn.Module) -> Plan:
    """Return the plan in which every tensor is B (replicated).

    It is taken if no other plan can be followed.
    """
    return resolve(model, plain_slots(model), program.placement, Plan())


def named_plans(program: RecordedStep, model: torch.nn.Module) -> dict[str, Callable[[], Plan]]:
    """Return functions that make the plans by name, to compare the found plan with.

    There is one for each combination of a name per placement axis: ``"zero3, tensor"`` on two axes.
    The layouts of the model's inputs are added to each plan.
    """
    combinations = itertools.product(_NAMED_PLANS, repeat=program.placement.ndim)
    return {", ".join(names): partial(_named_plan, program, model, names) for names in combinations}


def _named_plan(program: RecordedStep, model: torch.nn.Module, names: tuple[str, ...]) -> Plan:
    """Return the plan of one name for each axis, with the layouts of the model's inputs."""
    placement = program.placement
    plan_by_axis = dict(zip(axis_names(placement), names, strict=True))
    plan = plan_for(model, plain_slots(model), placement, plan_by_axis)
    _add_inputs(plan, program, tuple(_NAMED_PLANS[name] for name in names))
    return plan


def _add_inputs(plan: Plan, program: RecordedStep, sbp: tuple) -> None:
    """Add ``sbp`` to the plan for each input of the model that has enough rows for it."""
    parts = math.prod(n for n, e in zip(program.placement.shape, sbp) if e.is_split)
    for event in program.events:
        if isinstance(event, Enter) and event.module == "":
            border = plan.modules.get("", Border())
            inputs = {
                key: sbp
                for key, v in event.arguments.items()
                if (shape := program.values[v].spec.shape) and shape[0] >= parts > 1
            }
            if inputs:
                plan.modules[""] = Border({**inputs, **border.inputs}, border.outputs)
