"""A check, in check mode, that all ranks step their optimizers with equal hyperparameters."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..dispatch.plans.shards import is_global
from ..movement import check_mode


def install() -> None:
    """Register a hook before each optimizer step that compares hyperparameters in check mode.

    A learning rate that only one rank lowers would make its shard, or its copy of a parameter,
    wrong.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Compare the optimizer's hyperparameters between ranks, if check mode is on."""
    if not check_mode.enabled:
        return
    parameters = (x for group in optimizer.param_groups for x in group["params"])
    first: Any = next(filter(is_global, parameters), None)
    if first is not None:
        check_mode.check_hyperparameters(optimizer, first.placement)
