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
from ...dispatch.running.agreed import tell as tell_error
from ...spec.tracer import Tracer
from ...tensor.storage.step_layout import OwnedState
from ..sharded.step import around_closure, install_hooks
from .deal import Shape, flops_of
from .owners import ParameterOwners, give_owners, owners_of
from .states import settle, tell
from .whole import WholeStep

Some = TypeVar("Some", bound=Optimizer)

# Package and class of optimizers that get whole matrices automatically: their code is known to step
# each parameter independently, and never to raise because of values.
_KNOWN = (("torch", "Muon"), ("pytorch_optimizer", "Muon"))


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
        _install(optimizer)
    elif _is_owned(optimizer):
        raise RuntimeError(
            f"matrix_step: this {type(optimizer).__name__} steps whole matrices already, and their "
            "owners have its state. Call matrix_step before its first step; of a Muon, which does "
            "so by itself, too."
        )
    give_owners(optimizer, ParameterOwners(groups or _takes, cost or flops_of))
    return optimizer


def _takes(group: dict[str, Any]) -> bool:
    """Return whether a parameter group is stepped whole: unless it has ``"use_muon": False``.

    This is the default of ``matrix_step``'s argument ``groups``.
    """
    return bool(group.get("use_muon", True))


def _install(optimizer: Any) -> None:
    """Install the hooks of ``matrix_step`` on an optimizer, and wrap its ``step`` for errors."""
    before = optimizer.register_step_pre_hook(_before).id
    after = optimizer.register_step_post_hook(_after).id
    optimizer.register_state_dict_post_hook(tell)
    optimizer.__dict__["_innermost"] = before, after
    optimizer.step = types.MethodType(_guarded(optimizer.step), optimizer)
    _watch()


def _guarded(step: Any) -> Callable[..., Any]:
    """Return the method ``step`` wrapped, so that an error in it leaves the old values.

    Layouts and gradients are restored on this rank, and the error is raised on all ranks.
    """

    @functools.wraps(step)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            owners = owners_of(self)
            if owners is not None and owners.under_way is not None:
                whole, owners.under_way = owners.under_way, None
                whole.undo()
                if isinstance(error, Exception) and whole.takes_part():
                    tell_error(error, whole.ranks)
            raise

    return guarded


# -- around a step ---------------------------------------------------------------------------------


def _before(optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    enter(optimizer)
    return around_closure(args, kwargs, lambda: leave(optimizer), lambda: enter(optimizer))


def _after(optimizer: Any, args: tuple, kwargs: dict) -> None:
    leave(optimizer)


@torch.no_grad()
def enter(optimizer: Any) -> None:
    """Send each parameter that ``optimizer`` updates as a whole matrix to the rank that owns it.

    Called before the step. The gradients are sent with the parameters, and so is optimizer state
    that is not on the owner rank yet.
    """
    owners = owners_of(optimizer)
    assert owners is not None
    if owners.under_way is not None:  # an earlier step raised without passing ``_guarded``
        owners.under_way.undo()
    owners.deal(optimizer)
    owned = [(p, owners.of(p)) for p in owners.params(optimizer)]
    for param, owner in owned:
        if optimizer.state.get(param) or param.grad is not None:
            settle(optimizer, param, owner)
    owners.under_way = WholeStep(optimizer, owned)


@torch.no_grad()
def leave(optimizer: Any) -> None:
    """Send the new values of the parameters back to all shards, once every owner has stepped.

    Called after the step. If an owner has raised, all ranks raise, with the old values.
    """
    owners = owners_of(optimizer)
    if owners is None or owners.under_way is None:
        return
    whole, owners.under_way = owners.under_way, None
    try:
        if whole.takes_part():
            tell_error(None, whole.ranks)  # raises if another owner has raised
    except BaseException:
        whole.undo()
        raise
    whole.leave()


# -- without a call of matrix_step -----------------------------------------------------------------


_PLANNED = "_has_a_plan"  # name of a parameter's attribute


def install_known(module: nn.Module) -> None:
    """Make known matrix optimizers (Muon) of this module's parameters use ``matrix_step``.

    ``parallelize`` calls this. The optimizer may be made later: it is found at its first step.
    """
    params: list[Any] = list(module.parameters())
    for param in params:
        if is_global(param):
            param.__dict__[_PLANNED] = True
    _watch()


@functools.cache
def _watch() -> None:
    """Register ``_look`` to be called before each step of any optimizer; only the first time."""
    install_hooks()
    Tracer(on_optimizer_step=_look).always()


def _look(optimizer: Any) -> None:
    """Apply ``matrix_step`` to an optimizer that needs it, and keep its hooks innermost.

    Called before each step of any optimizer. Known optimizers (Muon) of a parallelized module need
    it, and copies of an optimizer with ``matrix_step``, which lack its hooks.
    """
    if "_innermost" not in optimizer.__dict__ and "_looked_at" not in optimizer.__dict__:
        params = [p for group in optimizer.param_groups for p in group["params"] if is_global(p)]
        if params:
            optimizer.__dict__["_looked_at"] = True
            is_known = _is_known(optimizer) and any(_PLANNED in p.__dict__ for p in params)
            if any(p.placement.size > 1 for p in params) and (is_known or _is_owned(optimizer)):
                matrix_step(optimizer)
    if "_innermost" in optimizer.__dict__:
        # Innermost: the last of the pre-hooks, and the first of the post-hooks.
        before, after = optimizer.__dict__["_innermost"]
        optimizer._optimizer_step_pre_hooks.move_to_end(before)
        optimizer._optimizer_step_post_hooks.move_to_end(after, last=False)


def _is_known(optimizer: Any) -> bool:
    """Return whether the class of ``optimizer``, or a base class of it, is one of ``_KNOWN``."""
    names = {(c.__module__.partition(".")[0], c.__name__) for c in type(optimizer).__mro__}
    return any(known in names for known in _KNOWN)


def _is_owned(optimizer: Any) -> bool:
    """Return whether the optimizer has state that lies whole on owner ranks.

    It then has to step whole matrices. A copy of such an optimizer is recognized by this: its state
    was copied, its hooks were not.
    """
    return any(isinstance(state, OwnedState) for state in optimizer.state.values())
