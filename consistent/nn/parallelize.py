"""Distribute an ordinary module over ranks without changing its code (``parallelize``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mirrored.freed_memory import give_back_freed_memory
from mirrored.transports.default import current

from ..dispatch.plans.gradients import settled_spec
from ..movement.world import my_coordinate
from ..spec import B, NdSbp, Placement, SbpLike, TensorSpec
from ..tensor.making.create import check_world, distribute
from ..tensor.making.scope import resolved_placement
from . import deferred
from .assigned import install_assign
from .inputs import install_inputs
from .installed import install, installed_plan, store_plan
from .plan import Plan
from .planners import plan_for
from .planners.context import takes_whole_sequences
from .planners.registry import WithCodecs
from .planners.resolve import resolve
from .planners.searched import resolve_auto
from .rank_values import broadcast_values, check_equal_modules, check_values, layouts_text
from .same_object import become_global
from .slots import Slot, global_slots, plain_attributes, plain_gradients, plain_slots


def parallelize(
    module: torch.nn.Module,
    placement: Placement | None = None,
    plan: str | Mapping[str, Any] | Plan | WithCodecs | None = None,
    *,
    inputs: SbpLike | Mapping[str, SbpLike] | None = None,
    sync: bool = True,
    check: bool = False,
    verbose: bool = False,
    initialise: bool = True,
    example: Any = None,
    memory: int | None = None,
    keep_bytes: int | None = None,
) -> torch.nn.Module:
    """Make every parameter and buffer of ``module`` a global tensor, in place.

    Also installs the hooks that the plan needs. The module's code is not changed.

    Args:
        module: the same module on every rank.
        placement: the placement of all tensors; by default that of the ``placement_scope``.
        plan: one of

            * a name: ``"data"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ``"tensor"``,
              ``"tensor+sequence"``, ``"context"`` (each rank has a part of each sequence),
              ``"expert"``, ``"zero1+expert"`` to ``"zero3+expert"`` (experts divided among the
              ranks, and the rest as the other plan says), ``"hf"`` (the model's own plan);
            * ``zero3(gather="int8", reduce="int8")``, ``zero1(reduce="int8")``,
              ``data_parallel(reduce="powersgd:4")``: these plans with fewer bytes communicated;
            * a name for each axis: ``{"dp": "zero3", "tp": "tensor"}``, by the names of the
              placement's axes, or in their order if they have no names;
            * patterns -> layouts (SBP: one of S, B, P for each placement axis), such as
              ``{"*.fc1.weight": S(0), "lm_head.*": S(0)}``. A pattern matches whole names of
              parameters and buffers as in ``fnmatch``, and the first match counts. Tensors without
              a match are B (replicated), a tied tensor matches by any of its names, and ``"*"``
              applies where no other pattern does;
            * a ``Plan``, such as ``Plan.load(path)``;
            * ``"auto"``: the plan with the least estimated time on ``example``, among layouts
              chosen for the whole module at once and the plans by name. The notes of the plan,
              which are printed with it, have the estimated time of each.

            By default all tensors are B, as with ``"data"``. Tensors that are global already stay
            as they are: if layers were added to a parallelized module, the plan applies to the new
            layers only, and a module that is entirely global keeps its plan. Use
            ``consistent.move`` to change the plan or the placement.
        inputs: the layout in which the plain tensors that the module is called with make up the
            batch: with ``S(0)`` (sharded along dim 0) each rank passes its part, with ``B``
            (replicated) all of it. For several axes, give one entry for each, or ``{"dp": S(0)}``,
            with B on the others. By the names of arguments, give
            ``{"*": S(0), "position_ids": B}``. Parts may be uneven. Numbers, tensors without dims
            and global tensors stay as they are. By default plain tensors are taken as B in ops with
            a global tensor, and ranks compare them; ``"context"`` takes them as B at once.
        sync: take the values of the placement's first rank, also for tensors that are neither
            parameters nor buffers, which stay plain. With ``False`` each rank takes its own values,
            which must be equal.
        check: raise if the values differ, instead of taking those of the first rank.
        verbose: print the plan on the placement's first rank.
        initialise: for a module that was built on ``meta``: give its tensors, of which only shards
            are allocated, the values that its modules' ``reset_parameters`` and ``_init_weights``
            would give on one rank. With ``False`` they get no values, to be loaded later.
        example: for ``"auto"``: a batch with typical sizes, whose masks and tokens may be read: a
            tensor, a tuple of arguments, or a mapping of keywords. The example of the placement's
            first rank is used on all ranks.
        memory: for ``"auto"``: the bytes that a rank may hold.
        keep_bytes: instead of the plan's value: the bytes of gathered parameters that a call of
            ``module`` may keep until its backward has ended (see ``Plan``).

    Returns:
        ``module``. ``plan_of(module)`` is the plan that was chosen.

    Raises:
        ValueError: the plan is unknown or does not fit the module or the memory, the ranks' modules
            differ, a lazy module has not seen its first input, or the module was parallelized by
            another plan, or elsewhere.
        TypeError: a parameter is a DTensor, or a scripted module holds it.
        ImportError: ``"auto"`` needs scipy, and it is not installed.
    """
    placement, _ = resolved_placement("parallelize", placement, B)
    check_world("parallelize", placement)
    tensors = plain_slots(module)
    present_plan = installed_plan(module)
    if present_plan is not None and not tensors:
        _check_plan_unchanged(module, placement, plan, present_plan, keep_bytes)
        new_plan = present_plan
    else:
        plan = resolve_auto(module, placement, plan, example, memory)
        new_plan = plan_for(module, tensors, placement, plan).keeping(keep_bytes)
        inputs = (
            B
            if inputs is None and placement.size > 1 and takes_whole_sequences(new_plan)
            else inputs
        )
    grads = plain_gradients(tensors)
    if my_coordinate(placement) is not None and (sync or check):
        known_ids = {id(places[0].value) for places in tensors}
        attributes = [x for x in plain_attributes(module) if id(x[0].value) not in known_ids]
        all_tensors = [*tensors, *grads, *attributes]
        check_equal_modules(module, all_tensors, placement, new_plan)
        (check_values if check else broadcast_values)("parallelize", all_tensors, placement)
        del all_tensors, attributes  # they refer to whole tensors, which _lay_out frees one by one
    meta_names = [places[0].name for places in tensors if places[0].value.is_meta]
    install_assign({slot.owner: None for places in tensors for slot in places})
    _lay_out(tensors, placement, new_plan.on(placement))
    give_back_freed_memory()
    if meta_names and initialise:
        deferred.initialise(module, meta_names)
    if initialise:
        deferred.check_attributes(module)
    if new_plan is not present_plan:
        install(module, placement, new_plan, inputs)
        if present_plan is not None:
            store_plan(module, _join_plans(module, placement, present_plan, new_plan))
    elif inputs is not None:
        install_inputs(module, placement, inputs)
    _lay_out_gradients(grads)
    if verbose and current().rank == placement.first_rank:
        print(f"{type(module).__name__} on {placement}\n{new_plan}")
    return module


def plan_of(module: torch.nn.Module) -> Plan:
    """Return the plan that ``parallelize`` chose for ``module``, with every tensor by its name.

    Raises:
        ValueError: the module was not parallelized.
    """
    plan = installed_plan(module)
    if plan is None:
        raise ValueError(
            f"plan_of: this {type(module).__name__} was not parallelized. Call "
            "consistent.parallelize(module, placement, plan), and ask for the plan of what it "
            "returns."
        )
    return plan


def _check_plan_unchanged(
    module: torch.nn.Module, placement: Placement, plan: Any, old_plan: Plan, keep_bytes: int | None
) -> None:
    """Raise if an entirely global module is parallelized again with another placement or plan.

    Args:
        module: the module.
        placement, plan, keep_bytes: what ``parallelize`` is called with.
        old_plan: the plan that the module has.

    Raises:
        ValueError: the message names the difference.
    """
    slots = global_slots(module)
    kind, move_call = type(module).__name__, "consistent.move(module, optimizer, placement, plan)"
    tensor: Any = next((places[0].value for places in slots), None)
    if tensor is not None and tensor.placement != placement:
        raise ValueError(
            f"parallelize: this {kind} is on {tensor.placement} already, and {placement} is asked "
            f"for. Call {move_call}, which takes it there with its gradients and its optimizer."
        )
    if plan is None:
        return
    new_plan = None
    if plan != "auto":
        new_plan = plan_for(module, slots, placement, plan).keeping(keep_bytes)
    if new_plan != old_plan:
        layouts: Any = {} if new_plan is None else new_plan.tensors
        changed_name = next(
            (name for name, x in layouts.items() if x != old_plan.layouts(name)), None
        )
        example = "" if changed_name is None else (
            f": {changed_name!r} is {layouts_text(old_plan.layouts(changed_name))}, and "
            f"{layouts_text(layouts[changed_name])} is asked for"
        )  # fmt: skip
        raise ValueError(
            f"parallelize: this {kind} was parallelized by another plan{example}. "
            f"Call {move_call} to change the plan; leave plan out, or give the same one, to keep "
            'it; plan="auto" is for a module that is plain.'
        )


def _join_plans(
    module: torch.nn.Module, placement: Placement, old_plan: Plan, added_plan: Plan
) -> Plan:
    """Return one plan for a module that was parallelized, and got new layers since.

    If the module's tensors are on several placements, which one plan cannot describe, only
    ``added_plan`` is returned.

    Args:
        module: the module.
        placement: the placement of the new layers.
        old_plan: the plan from before.
        added_plan: the plan of the new layers.
    """
    slots = global_slots(module)
    if any(places[0].value.placement != placement for places in slots):  # type: ignore[attr-defined]
        return added_plan  # one plan cannot describe tensors on several placements
    names = [slot.name for places in slots for slot in places]
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    old_part = old_plan.part([name for name in names if name not in added_plan.tensors], modules)
    joined_plan = Plan(
        {**old_part.tensors, **added_plan.tensors},
        {**old_part.modules, **added_plan.modules},
        axes=added_plan.axes,
        notes=list(dict.fromkeys([*old_plan.notes, *added_plan.notes])),
        keep_bytes=added_plan.keep_bytes,
    )
    return resolve(module, slots, placement, joined_plan)


def _lay_out(tensors: list[list[Slot]], placement: Placement, plan: Plan) -> None:
    """Replace each plain tensor by a global one, in the layout in which the plan stores it.

    Each whole tensor is freed before the next is laid out, so that peak memory is little more than
    that of the plain module. For that, ``tensors`` is emptied.

    Args:
        tensors: for each tensor, the places in the module that hold it.
        placement: the placement of all tensors.
        plan: their layouts.
    """
    while tensors:
        places = tensors.pop(0)
        layouts = plan.layouts(places[0].name)
        assert layouts is not None
        value = places[0].value
        global_tensor = _as_global(value, placement, layouts.sbp)
        if isinstance(value, torch.nn.Parameter):
            global_tensor = become_global(value, global_tensor, places[0].name)
        for slot in places:
            slot.put(global_tensor)


def _lay_out_gradients(grads: list[list[Slot]]) -> None:
    """Make the gradients from before ``parallelize`` global, in the layouts of the plan.

    Args:
        grads: a list for each gradient, with one slot that names its parameter's owner and key.
    """
    for ((owner, key, _, grad),) in grads:
        param: Any = owner._parameters[key]
        param.grad = distribute(grad, param.placement, settled_spec(param).sbp)


def _as_global(value: torch.Tensor, placement: Placement, sbp: NdSbp) -> torch.Tensor:
    """Return a global tensor with the values of ``value``; a parameter if ``value`` is one.

    If ``value`` was built on ``meta``, the result has an uninitialized shard.
    """
    spec = TensorSpec.of(placement, sbp, value.shape, value.dtype)
    if value.is_meta:
        global_tensor: Any = deferred.empty_shard(spec)
    else:
        global_tensor = distribute(value.detach(), placement, sbp)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(global_tensor, requires_grad=value.requires_grad)
    return global_tensor
