"""Plans by name, and the join of the plans of several axes into one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...spec import Placement, Sbp, as_nd_sbp, elsewhere
from ...spec.nearest import suggestion
from ..plan import Plan
from ..plan.names import is_pattern
from ..slots import Slot
from .asked import PlanRequest
from .context import plan_context
from .data import data_parallel, plan_data
from .experts import plan_expert, with_divided_experts
from .hf import plan_hf
from .resolve import resolve
from .sequence import plan_sequence
from .tensor import plan_tensor
from .zero import plan_zero1, plan_zero2, plan_zero3, zero1, zero3

# Plans with arguments.
WithCodecs = data_parallel | zero1 | zero3

PLANNERS: dict[str, Callable[[PlanRequest], Plan]] = {
    "data": plan_data,
    "zero1": plan_zero1,
    "zero2": plan_zero2,
    "zero3": plan_zero3,
    "tensor": plan_tensor,
    "tensor+sequence": plan_sequence,
    "context": plan_context,
    "expert": plan_expert,
    "zero1+expert": with_divided_experts(plan_zero1),
    "zero2+expert": with_divided_experts(plan_zero2),
    "zero3+expert": with_divided_experts(plan_zero3),
    "hf": plan_hf,
}


def plan_for(
    module: torch.nn.Module, tensors: Sequence[Sequence[Slot]], placement: Placement, plan: Any
) -> Plan:
    """Return the full plan that the argument ``plan`` of ``parallelize`` stands for.

    It has the layouts of each tensor by its first name, checked against the tensor's shape:
    ``{"fc.*": S(0)}`` becomes entries for ``fc.weight`` and ``fc.bias``, and B for all others.

    Args:
        module: the module.
        tensors: for each tensor, the places in the module that hold it.
        placement: the placement of the module.
        plan: the argument ``plan``: a plan's name, one for each axis, patterns, a ``Plan``, or
            None for all B (replicated).

    Raises:
        ValueError: a name is unknown, a pattern matches nothing, or an SBP does not fit its tensor.
        TypeError: ``plan`` is of another type.
    """
    if plan is None:
        plan = {}
    if isinstance(plan, str | WithCodecs):
        plan = _name_by_axis(plan, placement)
    if isinstance(plan, Sbp | int | tuple | list):
        raise _sbp_as_plan_error(plan)
    if isinstance(plan, Mapping) and _is_by_axis(plan, tensors, placement):
        plan = _plan_of_all_axes(module, tensors, placement, plan)
    elif isinstance(plan, Mapping):
        plan = Plan(plan)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"parallelize: plan is {plan!r} of type {type(plan).__name__}. Give a name "
            f"({', '.join(PLANNERS)}), one for each axis as {{'dp': 'zero3', 'tp': 'tensor'}}, "
            "patterns -> SBP, or a Plan."
        )
    return resolve(module, tensors, placement, plan)


def axis_names(placement: Placement) -> tuple[str, ...]:
    """Return the names of the placement's axes, or if they have none ``("0", "1", ...)``."""
    return placement.axes or tuple(str(axis) for axis in range(placement.ndim))


# -- plans by name ---------------------------------------------------------------------------------


def _name_by_axis(name: str | WithCodecs, placement: Placement) -> dict[str, Any]:
    """Return the plan ``name`` for the only axis: ``{"dp": "zero3"}``, or ``"data"`` for all axes.

    Raises:
        ValueError: the name is unknown, or there are several axes.
        TypeError: ``name`` is an SBP.
    """
    if isinstance(name, str) and not _is_plan_name(name):
        raise _sbp_as_plan_error(name)
    _planner(name)
    if placement.ndim > 1 and name != "data":
        axes = placement.axes or ("dp", "tp", *(f"axis{a}" for a in range(2, placement.ndim)))
        axes = axes[: placement.ndim]
        axis_of_name = axes[0] if str(name).startswith(("zero", "data")) else axes[-1]
        example = {axis: name if axis == axis_of_name else "data" for axis in axes}
        raise ValueError(
            f"parallelize: plan {name!r} is for one axis, and {placement} has {placement.ndim}. "
            f"Say what each axis does, such as {example}."
        )
    return dict.fromkeys(axis_names(placement), name)


def _is_by_axis(
    plan: Mapping[str, Any], tensors: Sequence[Sequence[Slot]], placement: Placement
) -> bool:
    """Return whether the keys of a mapping are axes, as in ``{"dp": "zero3"}``.

    Otherwise they are names or patterns of tensors.
    """
    if plan and set(plan) <= set(axis_names(placement)):
        return True
    names = [slot.name for places in tensors for slot in places]
    if any(is_pattern(key) or key in names for key in plan):
        return False
    return any(
        isinstance(v, Mapping | Plan | WithCodecs) or _is_plan_name(v) for v in plan.values()
    )


def _is_plan_name(value: Any) -> bool:
    """Return whether ``value`` is a text other than an SBP, and so may be the name of a plan."""
    if not isinstance(value, str):
        return False
    try:
        as_nd_sbp(value)
    except ValueError:
        return True
    return False


def _plan_of_all_axes(
    module: torch.nn.Module,
    tensors: Sequence[Sequence[Slot]],
    placement: Placement,
    plan_by_axis: Mapping[str, Any],
) -> Plan:
    """Return one plan from a plan for each axis.

    Axes whose plan is a zero plan or divides experts are planned last, because they split dims that
    the other axes leave whole; among them, those that divide experts come first.

    Args:
        module: the module.
        tensors: for each tensor, the places in the module that hold it.
        placement: its placement.
        plan_by_axis: axis -> plan; ``"data"`` for an axis that is not named.
    """
    axes = _axes_of(plan_by_axis, placement)
    tensors_by_name = {places[0].name: places[0].value for places in tensors}
    names = {places[0].name: [slot.name for slot in places] for places in tensors}
    shown_axes = () if axes == axis_names(placement) and not placement.axes else axes
    plans: dict[int, Plan] = {}
    for axis in sorted(
        range(len(axes)), key=lambda a: _planning_order(str(plan_by_axis.get(axes[a])))
    ):
        request = PlanRequest(
            module, tensors_by_name, names, placement.shape[axis], axes[axis], tuple(plans.values())
        )
        plans[axis] = _plan_of_one_axis(plan_by_axis.get(axes[axis], "data"), request, tensors)
    return Plan.join([plans[axis] for axis in range(len(axes))], shown_axes)


def _planning_order(name: str) -> tuple[bool, bool]:
    # Sort key of an axis by its plan's name: zero plans and those of experts last (False < True).
    ends = name.endswith("expert")
    return ends or name.startswith("zero"), not ends


def _axes_of(plan_by_axis: Mapping[str, Any], placement: Placement) -> tuple[str, ...]:
    """Return the placement's axis names in order; unnamed axes take the keys of ``plan_by_axis``.

    So ``{"dp": "zero3", "tp": "tensor"}`` serves for a placement of 2 axes without names, too.

    Raises:
        ValueError: a key of ``plan_by_axis`` is not an axis.
    """
    names = axis_names(placement)
    if (
        placement.axes is None
        and len(plan_by_axis) == placement.ndim
        and not set(plan_by_axis) <= set(names)
    ):
        return tuple(plan_by_axis)
    for key in plan_by_axis:
        if key not in names:
            raise ValueError(
                f"parallelize: the plan names axis {key!r}, and {placement} has "
                f"{', '.join(map(repr, names))}.{suggestion(key, names)} Name its axes by "
                f"placement(type, ranks, axes={tuple(plan_by_axis)!r})."
            )
    return names


def _plan_of_one_axis(
    axis_plan: Any, request: PlanRequest, tensors: Sequence[Sequence[Slot]]
) -> Plan:
    """Return the plan of one axis, which may be given by name, as patterns or as a ``Plan``."""
    if isinstance(axis_plan, WithCodecs) or (
        isinstance(axis_plan, str) and _is_plan_name(axis_plan)
    ):
        return _planner(axis_plan)(request)
    if isinstance(axis_plan, str | Sbp | int | tuple | list):
        raise _sbp_as_plan_error(axis_plan)
    plan = axis_plan if isinstance(axis_plan, Plan) else Plan(axis_plan)
    line = Placement("cpu", [0])  # any placement of one axis serves to resolve the patterns
    return resolve(request.module, tensors, line, plan)


def _sbp_as_plan_error(sbp: Any) -> TypeError:
    """Return the error for an SBP in place of a plan."""
    text = repr(sbp) if isinstance(sbp, str) else f"{sbp}"
    return TypeError(
        f"parallelize: the plan is {text}, which says how one tensor lies and not of which. "
        f"Give patterns -> SBP, such as {{'*': {text}}}, or a name ({', '.join(PLANNERS)})."
    )


def _planner(name: str | WithCodecs) -> Callable[[PlanRequest], Plan]:
    """Return the planner of a plan's name.

    Raises:
        ValueError: there is none.
    """
    if isinstance(name, WithCodecs):
        return name
    if name not in PLANNERS:
        raise ValueError(
            f"parallelize: there is no plan {name!r}.{_name_hint(name)} Plans are "
            f"{', '.join(PLANNERS)}, and auto; or give patterns -> SBP, or a Plan "
            "(Plan.load(path) reads a file)."
        )
    return PLANNERS[name]


def _name_hint(name: str) -> str:
    """Return a hint for the error about an unknown plan name; it may be empty.

    It is the plan's name here, if ``name`` is another library's, or the most similar name.
    """
    word = re.sub(r"[-_ ]|parallel(ism)?", "", name.lower())
    name_here = elsewhere.PLAN_HINTS.get(word)
    return f" It is {name_here} here." if name_here else suggestion(word, PLANNERS)
