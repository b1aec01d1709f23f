"""What of a model lies in one stage, as a module of its own that holds the same parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..nn.parallelize import plan_of
from ..nn.plan import Plan
from ..nn.planners.resolve import check_modules, check_names
from ..nn.slots import plain_slots
from ..spec import B, Placement
from .cut import Cut


def share_of(cut: Cut, stage: int) -> nn.Module:
    """The parts of a stage under the names that they have in the model."""
    root = nn.Module()
    for name, (module, at) in cut.owners.items():
        if at == stage:
            _at(root, name)._parameters = module._parameters
    for unit in cut.stages[stage]:
        if has_state(unit.module):
            path, _, key = unit.name.rpartition(".")
            _at(root, path)._modules[key] = unit.module
    return root


def modules_of(cut: Cut, stage: int) -> list[nn.Module]:
    """What holds the parameters of a stage."""
    own: list[nn.Module] = [unit.module for unit in cut.stages[stage]]
    return own + [_holder(module) for module, at in cut.owners.values() if at == stage]


def plans_of(model: nn.Module, plan: Any, count: int) -> list[Any]:
    """The plan of each of ``count`` stages.

    Raises:
        ValueError: there is another number of plans, or a ``Plan`` speaks of what the whole model
            does not have.
    """
    several = isinstance(plan, list | tuple)
    plans = list(plan) if several else [plan] * count
    if len(plans) != count:
        raise ValueError(
            f"pipeline: {len(plans)} plans are given for {count} stages. Give one for each, "
            "or a single one for all."
        )
    for each in plans if several else [plan]:
        _check_plan(model, each)
    return plans


def _check_plan(model: nn.Module, plan: Any) -> None:
    if isinstance(plan, Plan):
        tensors, modules = _names(model)
        check_names(model, tensors, plan)
        check_modules(model, modules, plan)


def plan_of_share(plan: Any, share: nn.Module) -> Any:
    """What a plan of the whole model says of one stage."""
    return plan.part(*_names(share)) if isinstance(plan, Plan) else plan


def _names(module: nn.Module) -> tuple[list[str], list[str]]:
    """The names of its tensors and of its modules."""
    tensors = [slot.name for places in plain_slots(module) for slot in places]
    return tensors, [name for name, _ in module.named_modules(remove_duplicate=False)]


def batch_axes(share: nn.Module, placement: Placement) -> tuple[int, ...]:
    """The axes along which every parameter is used whole."""
    layouts = list(plan_of(share).tensors.values())
    return tuple(
        axis for axis in range(placement.ndim) if all(each.use[axis] is B for each in layouts)
    )


def has_state(module: nn.Module) -> bool:
    """Whether it has parameters, or buffers that are saved: the others are constants, which every
    stage may compute with."""
    return any(
        x is not None and key not in each._non_persistent_buffers_set
        for each in module.modules()
        for key, x in (*each._parameters.items(), *each._buffers.items())
    )


def _holder(module: nn.Module) -> nn.Module:
    """A module that has the parameters of ``module`` itself, and none of those inside it."""
    made = nn.Module()
    made._parameters = module._parameters
    return made


def _at(root: nn.Module, path: str) -> nn.Module:
    for key in path.split(".") if path else ():
        found = root._modules.get(key)
        if found is None:
            found = root._modules[key] = nn.Module()
        root = found
    return root
