"""Install the hooks that a plan needs on a module, and remove them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..autograd.coded_sums import forget_codec
from ..dispatch.plans.shards import is_global
from ..spec import Placement, SbpLike
from .borders import BoxInputs, BoxOutputs, install_borders
from .experts import install_experts, uninstall_experts
from .module_calls import remove_hooks
from .plan import Plan

_PLAN = "_consistent_plan"


def installed_plan(module: torch.nn.Module) -> Plan | None:
    """Return the plan that ``parallelize`` has installed on ``module`` itself; None without one."""
    return module.__dict__.get(_PLAN)


def run_install_collectives(placement: Placement, plan: Plan) -> None:
    """Run the collectives of ``install`` in advance, so that ``install`` itself sends nothing.

    Their results are cached. ``move`` calls this while an error can still leave the job unchanged.
    """
    placed_plan = plan.on(placement)
    if _has_gathered_tensors(placed_plan) or _has_tensors_used_sharded(placed_plan, placement):
        from .sharded.prefetch import can_prefetch_on

        can_prefetch_on(placement)


def install(
    module: torch.nn.Module,
    placement: Placement,
    plan: Plan,
    inputs: SbpLike | Mapping[str, SbpLike] | None,
) -> None:
    """Install the hooks of ``plan`` on ``module``, for its calls and for optimizer steps.

    Args:
        module: a module whose tensors are laid out as the plan says.
        placement: the placement of its tensors.
        plan: the plan, which ``installed_plan`` returns from now on.
        inputs: the layouts of plain arguments, as ``parallelize`` takes them; None for no hook.
    """
    placed_plan = plan.on(placement)
    layouts: Sequence[Any] = list(placed_plan.tensors.values())
    install_borders(module, placed_plan)
    install_experts(module, placed_plan)
    _install_gathers(module, placement, placed_plan)
    from .owned.matrix_step import install_known

    install_known(module)
    if any(each.reduce for each in layouts):
        from .codecs import install_sum_codecs

        install_sum_codecs(module, placed_plan)
    if any(each.step != each.sbp or each.grad != each.sbp for each in layouts):
        from .sharded.step import install_step

        install_step(module, placed_plan)
    if inputs is not None:
        from .inputs import install_inputs

        install_inputs(module, placement, inputs)
    store_plan(module, plan)


def _install_gathers(module: torch.nn.Module, placement: Placement, placed_plan: Plan) -> None:
    """Install hooks by which modules gather parameters, and prefetching of gathers in ops.

    A module's hook gathers the parameters whose ``use`` layout differs from the stored one, before
    the module's forward. A parameter that is used sharded may be gathered by the op that reads it,
    if that is cheaper; such gathers are prefetched where messages run while the rank computes.
    """
    if _has_gathered_tensors(placed_plan):
        from .sharded.install import install_use

        install_use(module, placed_plan)
    if _has_tensors_used_sharded(placed_plan, placement):
        from .sharded.prefetch import can_send_while_computing
        from .sharded.prefetch_operands import install_operand_prefetch

        if can_send_while_computing(placement):
            install_operand_prefetch(module, placed_plan)


def store_plan(module: torch.nn.Module, plan: Plan) -> None:
    """Store ``plan`` as the plan that ``installed_plan`` returns for ``module``."""
    module.__dict__[_PLAN] = plan


def _has_gathered_tensors(plan: Plan) -> bool:
    """Return whether the plan has tensors whose layout in use differs from the stored one."""
    layouts: Sequence[Any] = list(plan.tensors.values())
    return any(each.use != each.sbp for each in layouts)


def _has_tensors_used_sharded(plan: Plan, placement: Placement) -> bool:
    """Return whether the plan has tensors that are stored sharded and used in the same layout.

    No module gathers these for its forward, but an op may gather them, which can be prefetched.
    """
    layouts: Sequence[Any] = list(plan.tensors.values())
    return any(
        each.use == each.sbp
        and any(e.is_split and n > 1 for e, n in zip(each.sbp, placement.shape, strict=True))
        for each in layouts
    )


def drop_prefetches(module: torch.nn.Module) -> None:
    """Wait for parameter prefetches that are under way in ``module``, and drop their results.

    ``move`` calls this before it replaces the parameters.
    """
    from .sharded.order import GatherOrders
    from .sharded.prefetch_operands import drop_operand_prefetches

    for hook in module._forward_pre_hooks.values():
        if isinstance(orders := getattr(hook, "__self__", None), GatherOrders):
            orders.drop()
    drop_operand_prefetches(module)


def uninstall(module: torch.nn.Module) -> None:
    """Undo ``install``: tensors are used and stepped in the layout in which they are stored.

    ``move`` calls this before it installs the new plan.
    """
    from .inputs import InputsHook
    from .sharded.gathered import GatheredParameters
    from .sharded.order import GatherOrders
    from .sharded.prefetch_operands import forget_place
    from .sharded.step import uninstall_step

    def is_plan_hook(hook: Any) -> bool:
        if isinstance(hook, BoxInputs | BoxOutputs | InputsHook):
            return True
        return isinstance(getattr(hook, "__self__", None), GatheredParameters | GatherOrders)

    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(gathered := getattr(hook, "__self__", None), GatheredParameters):
                gathered.retire()
    remove_hooks(module, is_plan_hook)
    uninstall_experts(module)
    for param in module.parameters():
        if is_global(param):
            uninstall_step(param)
            forget_codec(param)
            forget_place(param)
    module.__dict__.pop(_PLAN, None)
