"""Make a plain parameter global without changing its identity as a Python object.

Everything that refers to the parameter thus continues with the global one: an optimizer that was
made before, a list in a module, another module.

If torch cannot swap the tensor of the object, the module gets a new parameter instead. An optimizer
that has the old one would train a parameter that no module uses, so its next step raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..dispatch.plans.shards import HookOff, is_global
from ..movement.world import my_coordinate
from ..spec import Placement
from ..tensor.making.create import distribute
from ..tensor.storage.step_layout import OwnedState
from .rank_values import broadcast_values
from .sharded.step import step_spec
from .slots import Slot

_REPLACED = "_replaced_in"  # name that an abandoned parameter had in its module


def become_global(value: Any, global_param: Any, name: str) -> Any:
    """Make the Python object ``value`` the global parameter ``global_param``, and return it.

    Hooks of ``value`` stay. If torch refuses the swap, as it does while C++ code holds a weak
    reference to ``value``, ``global_param`` itself is returned, and optimizers of ``value`` will
    raise.

    Args:
        value: the plain parameter.
        global_param: the global parameter that it becomes.
        name: the name of the parameter in errors.
    """
    _check_optimizers_again()
    with HookOff():
        hooks, later_hooks = value._backward_hooks, value._post_accumulate_grad_hooks
        value.grad = None  # it has the old layout
        try:
            torch._C._swap_tensor_impl(value, global_param)  # type: ignore[attr-defined]
        except RuntimeError:
            mark_replaced(value, name)
            return global_param
        value.__class__, global_param.__class__ = global_param.__class__, value.__class__
        value.__dict__.update(global_param.__dict__)
        global_param.__dict__.clear()
        if global_param.requires_grad:
            global_param.register_hook(_raise_stale_graph)
    # Torch stores hooks with the tensor that was swapped out. The handles that remove hooks refer
    # to this dict, so it has to stay the same object.
    for key, hook in list((hooks or {}).items()):
        hooks[key] = value._hook_for_shards(hook)
    if hooks:
        value._backward_hooks = hooks
    if later_hooks:
        value._post_accumulate_grad_hooks = later_hooks
    return value


def _raise_stale_graph(_: Any) -> NoReturn:
    """Raise in backward if the graph was made before its parameters became global (tensor hook)."""
    raise RuntimeError(
        "backward: this graph was made before consistent.parallelize made its parameters global, "
        "and no gradient would reach them. Call backward before parallelize, or compute the loss "
        "again after it."
    )


# -- optimizers that were made before --------------------------------------------------------------

# Optimizers that were checked since the last parameter became global.
_checked_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_replaced(value: Any, name: str) -> None:
    """Mark a parameter that its module no longer has, so that an optimizer that steps it raises.

    Args:
        value: the parameter, which another object has replaced.
        name: the name that it had in its module, for the error.
    """
    value.__dict__[_REPLACED] = name
    _check_optimizers_again()


def _check_optimizers_again() -> None:
    """Have every optimizer checked by ``_check_before_step`` once more, at its next step.

    Called when a parameter becomes global.
    """
    _checked_optimizers.clear()
    _install_step_hook()


@cache
def _install_step_hook() -> None:
    register_optimizer_step_pre_hook(_check_before_step)


def _check_before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
    """Check an optimizer before its first step after parameters have become global (pre-hook).

    State from before, while the parameters were plain, becomes global, in the parameters' layouts.

    Raises:
        RuntimeError: it has a parameter that was replaced by another object in the module.
    """
    # Only steps without global tensors are compiled, and Dynamo would trace the code below.
    if torch.compiler.is_compiling() or optimizer in _checked_optimizers:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if _REPLACED in param.__dict__:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: it has the parameter "
                f"{param.__dict__[_REPLACED]!r} as it was while it was plain, and the module has "
                "another object in its place, which this optimizer would not train. Make the "
                "optimizer of model.parameters() after the module was made global."
            )
    if global_params := [param for param in params if is_global(param)]:
        _lay_out_state(optimizer, global_params)
    _checked_optimizers.add(optimizer)


@torch.no_grad()
def _lay_out_state(optimizer: Any, params: Sequence[Any]) -> None:
    """Lay out optimizer state that was made while the parameters were plain.

    The state gets the layout in which its parameter is stepped, and the values of the first rank,
    like the parameters.

    Raises:
        RuntimeError: the state is on ``meta``, so it has no values.
    """
    slots_by_placement: dict[Placement, list[tuple[list[Slot], Any]]] = {}
    for i, param in enumerate(params):
        state = optimizer.state.get(param, {})
        if isinstance(state, OwnedState):  # one rank holds the whole state and steps with it
            continue
        for key, value in state.items():
            is_plain = isinstance(value, torch.Tensor) and not is_global(value)
            if is_plain and value.ndim and value.shape == param.shape:
                if value.is_meta:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}.step: it made its state {key!r} of "
                        "a parameter on meta, so the state has no values. Make the optimizer of "
                        "model.parameters() after consistent.parallelize."
                    )
                slot = Slot(optimizer, key, f"state {i}.{key}", value)
                slots_by_placement.setdefault(param.placement, []).append(([slot], param))
    for placement, pairs in slots_by_placement.items():
        if my_coordinate(placement) is not None:
            broadcast_values("step", [slots for slots, _ in pairs], placement)
        for (slot,), param in pairs:
            global_state = distribute(slot.value, placement, step_spec(param).sbp)
            optimizer.state[param][slot.key] = global_state
