"""parallelize: turn an ordinary module into one that is spread over ranks; its code is not
touched."""

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
from ..tensor.making.scope import chosen
from . import deferred
from .assigned import install_assign
from .inputs import install_inputs
from .installed import hold_plan, install, installed_plan
from .plan import Plan
from .planners import plan_for
from .planners.context import takes_whole
from .planners.registry import WithCodecs
from .planners.resolve import resolve
from .planners.searched import searched
from .rank_values import check_alike, check_values, laid_text, send_values
from .same_object import become
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
    """Make every parameter and buffer of ``module`` a global tensor, in place, and install what its
    plan asks for; its code is not touched.

    Args:
        module: the same module on every rank.
        placement: where all of it goes; without it, where the ``placement_scope`` says.
        plan: one of

            * a strategy: ``"data"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ``"tensor"``,
              ``"tensor+sequence"``, ``"context"`` (each rank has a part of each sequence),
              ``"expert"``, ``"zero1+expert"`` to ``"zero3+expert"`` (experts divided among the
              ranks, and the rest as the other plan says), ``"hf"`` (the model's own plan);
            * ``zero3(gather="int8", reduce="int8")``, ``zero1(reduce="int8")``,
              ``data_parallel(reduce="powersgd:4")``: these plans in fewer bytes;
            * one for each axis: ``{"dp": "zero3", "tp": "tensor"}``, by the names of the
              placement's axes, or in their order where they have none;
            * patterns -> SBP, such as ``{"*.fc1.weight": S(0), "lm_head.*": S(0)}``: a pattern
              matches whole names of parameters and buffers as in ``fnmatch``, the first that
              matches counts, what none matches is B, a tied tensor matches by any of its names,
              and ``"*"`` applies where no other pattern does;
            * a ``Plan``, such as ``Plan.load(path)``;
            * ``"auto"``: the one that is estimated to be fastest on ``example``, of layouts chosen
              for the whole module at once and of the strategies by name. Its notes, which are
              printed with it, say what each was estimated to take.

            Without it all is B, which is ``"data"``. What is global already stays as it is: of a
            module to which layers were added the plan says how those lie, and one that is global
            as a whole keeps its plan. ``consistent.move`` changes that.
        inputs: how the plain tensors that the module is called with make up the batch: ``S(0)``,
            each rank passes its part; ``B``, each passes all of it. On several axes one SBP for
            each, or ``{"dp": S(0)}``, B on the others. ``{"*": S(0), "position_ids": B}`` says it
            by arguments' names. Parts may be uneven; numbers, tensors without dims and what is
            global already stay as they are. Without it plain tensors are taken as B where they
            meet a global one, and ranks compare them; ``"context"`` takes them as B at once.
        sync: take the values of the placement's first rank, those of tensors that are neither
            parameters nor buffers too, which stay plain. ``False``: each rank's own are taken, and
            must be equal.
        check: raise if the values differ, instead of taking those of the first rank.
        verbose: the placement's first rank prints the plan.
        initialise: a module that was built on ``meta`` gets only its shards allocated, and the
            values that its modules' ``reset_parameters`` and ``_init_weights`` give: those that
            the same call gives on one rank. ``False``: values are loaded later.
        example: of ``"auto"``, a batch whose sizes count, and whose masks and tokens may be looked
            at: a tensor, a tuple of arguments, or a mapping of keywords. That of the placement's
            first rank serves for all.
        memory: of ``"auto"``, bytes that a rank may hold.
        keep_bytes: in place of the plan's: bytes of gathered parameters that a call of ``module``
            may keep until its backward has ended (see ``Plan``).

    Returns:
        ``module``. ``plan_of(module)`` is what was decided.

    Raises:
        ValueError: the plan is unknown or does not fit the module or the memory, the ranks' modules
            differ, a lazy module has not seen its first input, or the module was parallelized by
            another plan, or elsewhere.
        TypeError: a parameter is a DTensor, or a scripted module holds it.
        ImportError: ``"auto"`` needs scipy, and it is not installed.
    """
    placement, _ = chosen("parallelize", placement, B)
    check_world("parallelize", placement)
    tensors = plain_slots(module)
    held = installed_plan(module)
    if held is not None and not tensors:
        _check_same(module, placement, plan, held, keep_bytes)
        decided = held
    else:
        plan = searched(module, placement, plan, example, memory)
        decided = plan_for(module, tensors, placement, plan).keeping(keep_bytes)
        inputs = B if inputs is None and placement.size > 1 and takes_whole(decided) else inputs
    grads = plain_gradients(tensors)
    if my_coordinate(placement) is not None and (sync or check):
        known = {id(places[0].value) for places in tensors}
        others = [x for x in plain_attributes(module) if id(x[0].value) not in known]
        all_tensors = [*tensors, *grads, *others]
        check_alike(module, all_tensors, placement, decided)
        (check_values if check else send_values)("parallelize", all_tensors, placement)
        del all_tensors, others
    empty = [places[0].name for places in tensors if places[0].value.is_meta]
    install_assign({slot.owner: None for places in tensors for slot in places})
    _lay_out(tensors, placement, decided.on(placement))
    give_back_freed_memory()
    if empty and initialise:
        deferred.initialise(module, empty)
    if initialise:
        deferred.check_attributes(module)
    if decided is not held:
        install(module, placement, decided, inputs)
        if held is not None:
            hold_plan(module, _joined(module, placement, held, decided))
    elif inputs is not None:
        install_inputs(module, placement, inputs)
    _lay_out_gradients(grads)
    if verbose and current().rank == placement.first_rank:
        print(f"{type(module).__name__} on {placement}\n{decided}")
    return module


def plan_of(module: torch.nn.Module) -> Plan:
    """What ``parallelize`` decided for ``module``, every tensor by its name.

    Raises:
        ValueError: it was not given to ``parallelize``.
    """
    found = installed_plan(module)
    if found is None:
        raise ValueError(
            f"plan_of: this {type(module).__name__} was not parallelized. Call "
            "consistent.parallelize(module, placement, plan), and ask for the plan of what it "
            "returns."
        )
    return found


def _check_same(
    module: torch.nn.Module, placement: Placement, plan: Any, held: Plan, keep_bytes: int | None
) -> None:
    """Raise if a module whose tensors are all global is asked to lie in another way than it does.

    Raises:
        ValueError: says what of it is otherwise.
    """
    slots = global_slots(module)
    kind, instead = type(module).__name__, "consistent.move(module, optimizer, placement, plan)"
    now: Any = next((places[0].value for places in slots), None)
    if now is not None and now.placement != placement:
        raise ValueError(
            f"parallelize: this {kind} is on {now.placement} already, and {placement} is asked "
            f"for. Call {instead}, which takes it there with its gradients and its optimizer."
        )
    if plan is None:
        return
    asked = None
    if plan != "auto":
        asked = plan_for(module, slots, placement, plan).keeping(keep_bytes)
    if asked != held:
        said: Any = {} if asked is None else asked.tensors
        named = next((name for name, x in said.items() if x != held.layouts(name)), None)
        example = "" if named is None else (
            f": {named!r} is {laid_text(held.layouts(named))}, and {laid_text(said[named])} is "
            "asked for"
        )  # fmt: skip
        raise ValueError(
            f"parallelize: this {kind} was parallelized by another plan{example}. "
            f"Call {instead} to change the plan; leave plan out, or give the same one, to keep it; "
            'plan="auto" is for a module that is plain.'
        )


def _joined(module: torch.nn.Module, placement: Placement, held: Plan, added: Plan) -> Plan:
    """The plan of a module to which layers were added since it got the plan ``held``."""
    slots = global_slots(module)
    if any(places[0].value.placement != placement for places in slots):  # type: ignore[attr-defined]
        return added  # a plan is of one placement
    names = [slot.name for places in slots for slot in places]
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    kept = held.part([name for name in names if name not in added.tensors], modules)
    both = Plan(
        {**kept.tensors, **added.tensors},
        {**kept.modules, **added.modules},
        axes=added.axes,
        notes=list(dict.fromkeys([*held.notes, *added.notes])),
        keep_bytes=added.keep_bytes,
    )
    return resolve(module, slots, placement, both)


def _lay_out(tensors: list[list[Slot]], placement: Placement, plan: Plan) -> None:
    """Put each tensor's global one in its place. A whole one is let go before the next is laid out,
    so that a module needs little more memory than it did."""
    while tensors:
        places = tensors.pop(0)
        layouts = plan.layouts(places[0].name)
        assert layouts is not None
        value = places[0].value
        made = _made_global(value, placement, layouts.sbp)
        if isinstance(value, torch.nn.Parameter):
            made = become(value, made, places[0].name)
        for slot in places:
            slot.put(made)


def _lay_out_gradients(grads: list[list[Slot]]) -> None:
    """Give parameters the gradients that they had, in the layout that gradients have from now
    on."""
    for ((owner, key, _, grad),) in grads:
        param: Any = owner._parameters[key]
        param.grad = distribute(grad, param.placement, settled_spec(param).sbp)


def _made_global(value: torch.Tensor, placement: Placement, sbp: NdSbp) -> torch.Tensor:
    spec = TensorSpec.of(placement, sbp, value.shape, value.dtype)
    if value.is_meta:
        made: Any = deferred.empty_shard(spec)
    else:
        made = distribute(value.detach(), placement, sbp)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made
