"""A plain parameter becomes a global one and stays the object that it is, so that what refers to it
goes on with the global one: an optimizer that was made before, a list of a module's own, a module
outside.

Where torch cannot give the object another tensor, the module gets a new parameter, and the next
step of an optimizer that has the old one raises: it would train what no module has any more.
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
from .rank_values import send_values
from .sharded.step import step_spec
from .slots import Slot

_REPLACED = "_replaced_in"  # name that an abandoned parameter had in its module


def become(value: Any, made: Any, name: str) -> Any:
    """The object ``value`` as the global parameter ``made``; ``made`` itself where torch refuses,
    as it does while something in C++ refers weakly to ``value``.

    Args:
        name: what to call it in an error.
    """
    _look_at_optimizers()
    with HookOff():
        hooks, later_hooks = value._backward_hooks, value._post_accumulate_grad_hooks
        value.grad = None  # in the old layout
        try:
            torch._C._swap_tensor_impl(value, made)  # type: ignore[attr-defined]
        except RuntimeError:
            abandon(value, name)
            return made
        value.__class__, made.__class__ = made.__class__, value.__class__
        value.__dict__.update(made.__dict__)
        made.__dict__.clear()
        if made.requires_grad:
            made.register_hook(_refuse)
    # They are kept with what the object stood for. Whoever added one may take it off, so the table
    # stays the object that it is.
    for key, hook in list((hooks or {}).items()):
        hooks[key] = value._on_shards(hook)
    if hooks:
        value._backward_hooks = hooks
    if later_hooks:
        value._post_accumulate_grad_hooks = later_hooks
    return value


def _refuse(_: Any) -> NoReturn:
    raise RuntimeError(
        "backward: this graph was made before consistent.parallelize made its parameters global, "
        "and no gradient would reach them. Call backward before parallelize, or compute the loss "
        "again after it."
    )


# -- optimizers that were made before --------------------------------------------------------------

# Those that have stepped since the last parameter became global.
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def abandon(value: Any, name: str) -> None:
    """No module has ``value`` any more, which had this name: an optimizer that steps it raises."""
    value.__dict__[_REPLACED] = name
    _look_at_optimizers()


def _look_at_optimizers() -> None:
    """Look at every optimizer once more, when it steps next."""
    _seen.clear()
    _install_hook()


@cache
def _install_hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
    # Steps are compiled without global tensors only, and Dynamo would trace what follows.
    if torch.compiler.is_compiling() or optimizer in _seen:
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
    if laid := [param for param in params if is_global(param)]:
        _lay_out_state(optimizer, laid)
    _seen.add(optimizer)


@torch.no_grad()
def _lay_out_state(optimizer: Any, params: Sequence[Any]) -> None:
    """Lay state that was made while the parameters were plain as they are stepped. Its values are
    those of the first rank, as the parameters' are."""
    found: dict[Placement, list[tuple[list[Slot], Any]]] = {}
    for i, param in enumerate(params):
        state = optimizer.state.get(param, {})
        if isinstance(state, OwnedState):  # one rank has it whole, and steps it so
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
                found.setdefault(param.placement, []).append(([slot], param))
    for placement, pairs in found.items():
        if my_coordinate(placement) is not None:
            send_values("step", [slots for slots, _ in pairs], placement)
        for (slot,), param in pairs:
            laid = distribute(slot.value, placement, step_spec(param).sbp)
            optimizer.state[param][slot.key] = laid
