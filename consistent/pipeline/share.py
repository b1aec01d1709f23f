"""Collect one stage's share of a model in a module of its own, which holds the same parameters."""

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
    """Return a module that holds the units of a stage under the names that they have in the model.

    It can be passed to ``parallelize``, which lays out the parameters of this stage only. Units
    without parameters or saved buffers are left out.
    """
    root = nn.Module()
    for name, (module, owner_stage) in cut.owners.items():
        if owner_stage == stage:
            # The same dict: a parameter that is replaced in the share is replaced in the model.
            _module_at(root, name)._parameters = module._parameters
    for unit in cut.stages[stage]:
        if has_state(unit.module):
            path, _, key = unit.name.rpartition(".")
            _module_at(root, path)._modules[key] = unit.module
    return root


def modules_of(cut: Cut, stage: int) -> list[nn.Module]:
    """Return the modules that hold the parameters of a stage.

    Modules that contain units are represented by one with only their own parameters.
    """
    own: list[nn.Module] = [unit.module for unit in cut.stages[stage]]
    return own + [
        _parameter_holder(module)
        for module, owner_stage in cut.owners.values()
        if owner_stage == stage
    ]


def plans_of(model: nn.Module, plan: Any, count: int) -> list[Any]:
    """Return the plan of each of ``count`` stages: those of a list, or one plan for all.

    Raises:
        ValueError: the number of plans in a list is not ``count``, or a ``Plan`` names tensors or
            modules that the whole model does not have.
    """
    is_list = isinstance(plan, list | tuple)
    plans = list(plan) if is_list else [plan] * count
    if len(plans) != count:
        raise ValueError(
            f"pipeline: {len(plans)} plans are given for {count} stages. Give one for each, "
            "or a single one for all."
        )
    for checked_plan in plans if is_list else [plan]:
        _check_plan(model, checked_plan)
    return plans


def _check_plan(model: nn.Module, plan: Any) -> None:
    if isinstance(plan, Plan):
        tensors, modules = _tensor_and_module_names(model)
        check_names(model, tensors, plan)
        check_modules(model, modules, plan)


def plan_of_share(plan: Any, share: nn.Module) -> Any:
    """Return the entries of a plan of the whole model that name tensors or modules of ``share``.

    Other plans, such as "zero3", are returned as they are.
    """
    return plan.part(*_tensor_and_module_names(share)) if isinstance(plan, Plan) else plan


def _tensor_and_module_names(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the tensors and of the submodules of ``module``."""
    tensors = [slot.name for places in plain_slots(module) for slot in places]
    return tensors, [name for name, _ in module.named_modules(remove_duplicate=False)]


def batch_axes(share: nn.Module, placement: Placement) -> tuple[int, ...]:
    """Return the axes of ``placement`` along which the batch is split.

    They are those along which every parameter is used as B, as in data parallelism.
    """
    layouts = list(plan_of(share).tensors.values())
    return tuple(
        axis for axis in range(placement.ndim) if all(layout.use[axis] is B for layout in layouts)
    )


def has_state(module: nn.Module) -> bool:
    """Return whether ``module`` has parameters or buffers that are part of its state_dict.

    Only such modules are marked with a stage. Other buffers are constants, which every stage may
    use.
    """
    return any(
        x is not None and key not in submodule._non_persistent_buffers_set
        for submodule in module.modules()
        for key, x in (*submodule._parameters.items(), *submodule._buffers.items())
    )


def _parameter_holder(module: nn.Module) -> nn.Module:
    """Return a module with the own parameters of ``module``, without its submodules."""
    holder = nn.Module()
    holder._parameters = module._parameters
    return holder


def _module_at(root: nn.Module, path: str) -> nn.Module:
    """Return the module at the dotted ``path`` below ``root``; missing ones are created, empty."""
    for key in path.split(".") if path else ():
        child = root._modules.get(key)
        if child is None:
            child = root._modules[key] = nn.Module()
        root = child
    return root
