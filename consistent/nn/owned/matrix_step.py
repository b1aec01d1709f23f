"""Run an optimizer on whole matrices, each on the one rank that owns it (``matrix_step``).

It works by a pre-hook and a post-hook of the optimizer's step. These are kept innermost, so that
users' hooks see the parameters in their usual layouts.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ...dispatch.plans.shards import is_global
from ...dispatch.running.agreed import exchange_errors as tell_error
from ...spec.tracer import Tracer
from ...tensor.storage.step_layout import OwnedState
from ..sharded.step import install_step_hooks, wrap_closure
from .deal import Shape, flops_of
from .owners import ParameterOwners, owners_of, set_owners
from .states import add_owned_state, move_state_to_owner
from .whole import WholeStep

Some = TypeVar("Some", bound=Optimizer)

# Package and class of optimizers that get whole matrices automatically: their code is known to step
# each parameter independently, and never to raise because of values.
_KNOWN_OPTIMIZERS = (("torch", "Muon"), ("pytorch_optimizer", "Muon"))


def matrix_step(
    optimizer: Some,
    *,
    groups: Callable[[dict[str, Any]], bool] | None = None,
    cost: Callable[[Shape], float] | None = None,
) -> Some:
    """Make ``optimizer`` step whole matrices, each on one of the ranks that hold its shards.

    This rank, the owner, receives the other shards, runs the optimizer's own code on the whole
    matrix, and sends the new shards back.

    ```
    model = consistent.parallelize(GPT(), placement, "zero3")
    optimizer = consistent.matrix_step(SOAP(model.parameters(), lr=3e-3))
    ```

    Use it for optimizers that multiply, invert or decompose matrices (Shampoo, SOAP, Dion), and
    that step each parameter independently. During the step, parameters owned by other ranks have no
    gradient on this rank, so a norm over all parameters would cover only those of this rank.
    ``torch.optim.Muon`` and the ``Muon`` of ``pytorch_optimizer`` are handled automatically,
    without this call. The work is divided evenly among the ranks. A step takes one exchange to the
    owners, of parameters and gradients, and one back, of parameters.

    The state of a parameter is stored only on its owner. ``optimizer.state_dict()`` returns it as
    global tensors on every rank, and is a collective.

    Args:
        optimizer: any optimizer, before or after its first step.
        groups: (parameter group) -> whether its parameters are stepped whole; by default all groups
            except those with ``"use_muon": False``. Other parameters step as the plan says.
        cost: (shape) -> the work of stepping a parameter, in any unit, the same on every rank; by
            default the flops of a Newton-Schulz iteration.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or none of its parameters is global.
        RuntimeError: ``optimizer`` has stepped whole matrices already.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"matrix_step: optimizer is a {type(optimizer).__name__}. Give a torch.optim.Optimizer."
        )
    if not any(is_global(p) for group in optimizer.param_groups for p in group["params"]):
        raise TypeError(
            f"matrix_step: no parameter of this {type(optimizer).__name__} is global, so no rank "
            "holds a part of one. Call consistent.parallelize(model, placement, plan) first."
        )
    if owners_of(optimizer) is None:
        _install_on(optimizer)
    elif _has_owned_state(optimizer):
        raise RuntimeError(
            f"matrix_step: this {type(optimizer).__name__} steps whole matrices already, and their "
            "owners have its state. Call matrix_step before its first step; of a Muon, which does "
            "so by itself, too."
        )
    set_owners(optimizer, ParameterOwners(groups or _is_stepped_whole, cost or flops_of))
    return optimizer


def _is_stepped_whole(group: dict[str, Any]) -> bool:
    """Return whether a parameter group is stepped whole: unless it has ``"use_muon": False``.

    This is the default of ``matrix_step``'s argument ``groups``.
    """
    return bool(group.get("use_muon", True))


def _install_on(optimizer: Any) -> None:
    """Install the hooks of ``matrix_step`` on an optimizer, and wrap its ``step`` for errors."""
    pre_hook_id = optimizer.register_step_pre_hook(_before_step).id
    post_hook_id = optimizer.register_step_post_hook(_after_step).id
    optimizer.register_state_dict_post_hook(add_owned_state)
    optimizer.__dict__["_innermost"] = pre_hook_id, post_hook_id
    optimizer.step = types.MethodType(_guarded_step(optimizer.step), optimizer)
    _trace_optimizer_steps()


def _guarded_step(step: Any) -> Callable[..., Any]:
    """Return the method ``step`` wrapped, so that an error in it leaves the old values.

    Layouts and gradients are restored on this rank, and the error is raised on all ranks.
    """

    @functools.wraps(step)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            owners = owners_of(self)
            if owners is not None and owners.current_step is not None:
                whole_step, owners.current_step = owners.current_step, None
                whole_step.restore()
                if isinstance(error, Exception) and whole_step.has_shards():
                    tell_error(error, whole_step.ranks)
            raise

    return guarded


# -- around a step ---------------------------------------------------------------------------------


def _before_step(optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    begin_step(optimizer)
    return wrap_closure(args, kwargs, lambda: end_step(optimizer), lambda: begin_step(optimizer))


def _after_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
    end_step(optimizer)


@torch.no_grad()
def begin_step(optimizer: Any) -> None:
    """Send each parameter that ``optimizer`` updates as a whole matrix to the rank that owns it.

    Called before the step. The gradients are sent with the parameters, and so is optimizer state
    that is not on the owner rank yet.
    """
    owners = owners_of(optimizer)
    assert owners is not None
    if owners.current_step is not None:  # an earlier step raised without passing ``_guarded_step``
        owners.current_step.restore()
    owners.assign(optimizer)
    owned = [(p, owners.owner_of(p)) for p in owners.params(optimizer)]
    for param, owner in owned:
        if optimizer.state.get(param) or param.grad is not None:
            move_state_to_owner(optimizer, param, owner)
    owners.current_step = WholeStep(optimizer, owned)


@torch.no_grad()
def end_step(optimizer: Any) -> None:
    """Send the new values of the parameters back to all shards, once every owner has stepped.

    Called after the step. If an owner has raised, all ranks raise, with the old values.
    """
    owners = owners_of(optimizer)
    if owners is None or owners.current_step is None:
        return
    whole_step, owners.current_step = owners.current_step, None
    try:
        if whole_step.has_shards():
            tell_error(None, whole_step.ranks)  # raises if another owner has raised
    except BaseException:
        whole_step.restore()
        raise
    whole_step.finish()


# -- without a call of matrix_step -----------------------------------------------------------------


_PLANNED_MARK = "_has_a_plan"  # name of a parameter's attribute


def install_known(module: nn.Module) -> None:
    """Make known matrix optimizers (Muon) of this module's parameters use ``matrix_step``.

    ``parallelize`` calls this. The optimizer may be made later: it is found at its first step.
    """
    params: list[Any] = list(module.parameters())
    for param in params:
        if is_global(param):
            param.__dict__[_PLANNED_MARK] = True
    _trace_optimizer_steps()


@functools.cache
def _trace_optimizer_steps() -> None:
    """Have ``_prepare_optimizer`` called before each step of any optimizer; registered once."""
    install_step_hooks()
    Tracer(on_optimizer_step=_prepare_optimizer).install()


def _prepare_optimizer(optimizer: Any) -> None:
    """Apply ``matrix_step`` to an optimizer that needs it, and keep its hooks innermost.

    Called before each step of any optimizer. Known optimizers (Muon) of a parallelized module need
    it, and copies of an optimizer with ``matrix_step``, which lack its hooks.
    """
    if "_innermost" not in optimizer.__dict__ and "_looked_at" not in optimizer.__dict__:
        params = [p for group in optimizer.param_groups for p in group["params"] if is_global(p)]
        if params:
            optimizer.__dict__["_looked_at"] = True
            is_known = _is_known(optimizer) and any(_PLANNED_MARK in p.__dict__ for p in params)
            if any(p.placement.size > 1 for p in params) and (
                is_known or _has_owned_state(optimizer)
            ):
                matrix_step(optimizer)
    if "_innermost" in optimizer.__dict__:
        # Innermost: the last of the pre-hooks, and the first of the post-hooks.
        pre_hook_id, post_hook_id = optimizer.__dict__["_innermost"]
        optimizer._optimizer_step_pre_hooks.move_to_end(pre_hook_id)
        optimizer._optimizer_step_post_hooks.move_to_end(post_hook_id, last=False)


def _is_known(optimizer: Any) -> bool:
    """Return whether the class of ``optimizer``, or a base of it, is in ``_KNOWN_OPTIMIZERS``."""
    names = {(c.__module__.partition(".")[0], c.__name__) for c in type(optimizer).__mro__}
    return any(known in names for known in _KNOWN_OPTIMIZERS)


def _has_owned_state(optimizer: Any) -> bool:
    """Return whether the optimizer has state that is stored whole on owner ranks.

    It then has to step whole matrices. A copy of such an optimizer is recognized by this: its state
    was copied, its hooks were not.
    """
    return any(isinstance(state, OwnedState) for state in optimizer.state.values())
