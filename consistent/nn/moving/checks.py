"""Check that a job can be moved, before anything changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mirrored.transports.default import current

from ...dispatch import _C
from ...dispatch.plans.shards import is_global
from ...spec import Placement
from ..installed import installed_plan
from ..module_calls import this_thread
from ..sharded.step import in_step
from ..slots import Slot
from .job import params_of


def check_between_steps(model: Any) -> None:
    """Raise inside a forward of ``model``, a backward, ``no_sync`` or inference mode.

    Raises:
        RuntimeError: the message names which of them is under way.
    """
    if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        raise RuntimeError(
            "move: a backward is under way, and the gradients that it has yet to compute lie as "
            "their parameters do now. Call move after loss.backward() has returned."
        )
    if (module := _module_under_way(model)) is not None:
        raise RuntimeError(
            f"move: a forward is under way, of {type(module).__name__}, which has parameters at "
            "their present places in its hands. Call move between two calls of the model."
        )
    if not _C.is_synced():
        raise RuntimeError(
            "move: it is called inside no_sync(), and the next backward would add this placement's "
            "addends to those of another. Leave no_sync() first: gradients that were added up in "
            "it are summed as they move."
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "move: it is called inside torch.inference_mode(), and tensors made there cannot be "
            "trained. Call it outside."
        )


def _module_under_way(model: Any) -> torch.nn.Module | None:
    """Return the innermost module of ``model`` that is being called at this moment, or None.

    If no call is found, return one whose parameters are still gathered. Modules do not record
    that they are called, which would make calls slower. Python's frames are searched instead, but
    only those of module calls: reading ``f_locals`` of a frame keeps its variables alive.
    """
    modules = set(model.modules()) if isinstance(model, torch.nn.Module) else set()
    codes = {_CALL_CODE, *(getattr(each.forward, "__code__", None) for each in modules)}
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code in codes and code.co_argcount:
            caller = frame.f_locals.get(code.co_varnames[0])
            if isinstance(caller, torch.nn.Module) and caller in modules:
                return caller
        frame = frame.f_back
    gathered = (each.owner for run in this_thread.open_runs for each in run.unit.parameters)
    return next((owner for owner in gathered if owner in modules), None)


_CALL_CODE = torch.nn.Module._call_impl.__code__  # type: ignore[attr-defined]


def check_model(model: Any) -> None:
    """Raise if ``model`` was not parallelized as a whole.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it was not parallelized, or parts of it were parallelized separately.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"move: model is a {type(model).__name__}. Give the module that was given to "
            "consistent.parallelize."
        )
    kind = type(model).__name__
    inner = [name for name, m in model.named_modules() if name and installed_plan(m) is not None]
    if installed_plan(model) is None:
        tensors = [*model.parameters(), *model.buffers()]
        places = list(dict.fromkeys(x.placement for x in tensors if is_global(x)))  # type: ignore[attr-defined]
        if len(places) > 1:
            raise ValueError(
                f"move: the tensors of this {kind} are on {len(places)} placements, {places[0]} "
                f"and {places[1]} among them, as a pipeline's stages are, and move takes a model "
                "that is on one. Save a checkpoint, and load it into the pipeline that you want."
            )
        raise ValueError(
            f"move: this {kind} was not parallelized. Call consistent.parallelize(model, "
            "placement, plan) first, and give move the same module."
        )
    if inner:
        raise ValueError(
            f"move: {inner[0]!r} inside this {kind} was parallelized by itself, so the plan of "
            "the whole says nothing of it. Call consistent.parallelize once, for the whole model "
            "and with a plan that names that part."
        )


def check_tensors(slots: Sequence[Sequence[Slot]]) -> Placement:
    """Return the placement that all tensors of a model share.

    Args:
        slots: for each tensor, the places in the model that hold it.

    Raises:
        ValueError: the model has no global tensors, or they are on several placements.
        RuntimeError: an optimizer's step is under way.
    """
    if not slots:
        raise ValueError("move: the model has no parameters or buffers, so there is nothing to do.")
    first: Any = slots[0][0].value
    for places in slots:
        name, x = places[0].name, places[0].value
        if x._spec.placement != first._spec.placement:  # type: ignore[attr-defined]
            raise ValueError(
                f"move: {slots[0][0].name!r} is on {first.placement} and {name!r} on "
                f"{x.placement}, and move takes a model that is on one placement. Move single "  # type: ignore[attr-defined]
                "tensors by x.to_global(placement=...)."
            )
        if in_step(x):
            raise RuntimeError(
                f"move: an optimizer steps {name!r} now, or has raised while it did. Call move "
                "after optimizer.step() has returned."
            )
    return first._spec.placement


def check_optimizers(value: Any, model: torch.nn.Module) -> list[Optimizer]:
    """Return ``value``, the ``optimizer`` argument of ``move``, as a list.

    It is one optimizer, several or None.

    Raises:
        TypeError: an entry is not an optimizer.
        ValueError: a parameter of an optimizer is not a parameter of ``model``.
    """
    optimizers = (
        [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    )
    model_params = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"move: optimizer is a {type(optimizer).__name__}. Give a torch.optim.Optimizer, "
                "a list of them, or None."
            )
        for i, p in enumerate(params_of(optimizer)):
            if id(p) not in model_params:
                raise ValueError(
                    f"move: parameter {i} of {type(optimizer).__name__}, of shape "
                    f"{tuple(p.shape)}, is not a parameter of this {type(model).__name__}, and "
                    "would be left where it is. Give the optimizer of model.parameters(), made "
                    "after consistent.parallelize."
                )
    return optimizers


def check_placement(placement: Any) -> None:
    """Raise if ``placement`` is not a placement in this world.

    Raises:
        TypeError: it is not a placement.
        ValueError: it names ranks that the world does not have, or is on GPUs and there are none.
    """
    if not isinstance(placement, Placement):
        raise TypeError(
            f"move: placement is {placement!r} of type {type(placement).__name__}. Give "
            'consistent.placement("cpu", ranks), or None to stay on the same ranks.'
        )
    size, ranks = current().size, placement.ranks.ravel().tolist()
    unknown_ranks = [rank for rank in ranks if rank >= size]
    if unknown_ranks:
        raise ValueError(
            f"move: {placement} names rank {unknown_ranks[0]}, and the world has ranks 0 to "
            f"{size - 1}. A job moves among the ranks that the program was started on; to go on "
            "with more, save a checkpoint and start again."
        )
    if placement.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"move: {placement} is on GPUs, and this process sees none.")


def check_added_parameters(model: torch.nn.Module, old: Placement, new: Placement) -> None:
    """Raise if a model has a plain parameter, which a rank that joins the job has not trained.

    Such a parameter was added after ``parallelize``.

    Args:
        model: the model.
        old, new: the placement before and after the move.

    Raises:
        ValueError: ranks join, and there is one; the message names it.
    """
    joining_ranks = sorted(set(new.ranks.ravel().tolist()) - set(old.ranks.ravel().tolist()))
    added = [name for name, p in model.named_parameters() if not is_global(p)]
    if joining_ranks and added:
        raise ValueError(
            f"move: {added[0]!r} is a plain parameter, because it was added after consistent."
            f"parallelize. Rank {joining_ranks[0]}, which comes in, has not trained it, nor has "
            "its optimizer any state there. Add it before parallelize."
        )
