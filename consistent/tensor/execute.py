"""Running a plan that is more than one torch call on the shards."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..boxing.differentiable import box
from ..local import FORMS, Shards
from ..spec import B, TensorSpec
from .arguments import collect, fill, replace
from .follow import perform
from .plan import Plan, observers
from .shards import (
    HookOff,
    adopt,
    attach,
    plain,
    promote,
    rebox,
    retype,
    whole_result,
)
from .ties import alive, is_view, refuse_moved, tie, write_through

_Tensor = torch.Tensor


def execute(plan: Plan, args: tuple, kwargs: dict) -> Any:
    if plan.as_called:
        return plan.run(*args, **kwargs)
    if plan.kind == "constant":
        return plan.constant
    if plan.kind == "list":
        if alive and plan.inplace:
            refuse_moved(plan.name, args, kwargs)
        with HookOff():
            return retype(plan.run(*args, **kwargs), plan.outs)
    tensors: list[Any] = []
    collect(args, tensors)
    collect(tuple(kwargs.values()), tensors)
    first: Any = tensors[0] if tensors else None
    if plan.adopt:
        for index in plan.adopt:
            take = promote if plan.inplace and index == 0 else adopt
            tensors[index] = take(tensors[index], plan.placement, plan.name)
    if plan.inplace and first._moved_view:
        return write_through(plan, args, kwargs, first)
    if plan.inplace and plan.kind == "whole":
        return in_place_on_copy(plan, args, kwargs, tensors, first)
    specs = [t._spec for t in tensors]
    originals = {index: tensors[index] for index, _ in plan.put_back}
    for index, target in plan.boxes:
        tensors[index] = rebox(tensors[index], target, plan.name)
    if plan.outside:
        # Ops on meta tensors may be written in Python, where shape and device of a global tensor
        # are the logical ones.
        tensors = [plain(t) for t in tensors]
    if plan.told or plan.outside:
        out = perform(plan, partial(run_shards, plan, tensors, args, kwargs), tensors)
    else:
        out = run_shards(plan, tensors, args, kwargs)
    for index, target in plan.put_back:
        with torch.no_grad(), HookOff():
            back = box(plain(tensors[index]), target, specs[index])
            _Tensor.copy_(originals[index], back)
    moved = False
    if plan.kind == "whole":
        out, outs = whole_result(out, plan.placement)
        moved = bool(plan.boxes)
    else:
        outs = plan.outs
        if plan.counted:
            out, shapes = out
            outs = tuple(
                TensorSpec.of(plan.placement, o.sbp, shape, o.dtype)
                for o, shape in zip(outs, shapes, strict=True)
            )
        if plan.inplace:
            out = first
        else:
            out = retype(out, outs)
            moved = plan.kind == "form" or any(index == 0 for index, _ in plan.boxes)
    if is_view(plan) and not plan.inplace and (moved or getattr(first, "_moved_view", False)):
        tie(out, plan, first, args, kwargs)
    if observers:
        for observe in observers:
            observe(plan, specs, outs)
    return out


def run_shards(plan: Plan, tensors: list, args: tuple, kwargs: dict) -> Any:
    """The op on the shards ``tensors``, which lie as the plan says."""
    if plan.kind == "form":
        return run_form(plan, tensors, args, kwargs)
    with HookOff():
        if plan.kind == "template":
            assert plan.template is not None
            return plan.run(*fill(plan.template[0], tensors), **fill(plan.template[1], tensors))
        if plan.boxes or plan.adopt or plan.outside:
            source = iter(tensors)
            args, kwargs = replace(args, source), replace(kwargs, source)
        return plan.run(*args, **kwargs)


def run_form(plan: Plan, tensors: list, args: tuple, kwargs: dict) -> Any:
    shards = [plain(t) for t in tensors]
    assert plan.choice is not None and plan.choice.form is not None
    source = iter(shards)
    local = Shards(
        run=plan.run,
        call=plan.call,
        axes=plan.choice.form_axes,
        tensors=tuple(shards),
        specs=plan.specs,
        outs=plan.outs,
        args=replace(args, source),
        kwargs=replace(kwargs, source),
    )
    return FORMS[plan.choice.form](local)


def in_place_on_copy(plan: Plan, args: tuple, kwargs: dict, tensors: list, target: Any) -> Any:
    """An in-place op that fits no layout of its target: run it on a whole copy, then box the
    copy back."""
    spec = target._spec
    everywhere = (B,) * spec.placement.ndim
    copies = [
        rebox(t, t._spec.with_sbp(everywhere), plan.name) if t._spec.sbp != everywhere else t
        for t in tensors
    ]
    with HookOff():
        work = copies[0]
        if work is target:
            args, kwargs = replace(args, iter(copies)), replace(kwargs, iter(copies))
            out = perform(plan, partial(plan.run, *args, **kwargs), copies)
            return target if out is not None else None
        work = work.clone()
        copies[0] = attach(work, target._spec.with_sbp(everywhere))
        args, kwargs = replace(args, iter(copies)), replace(kwargs, iter(copies))
        out = perform(plan, partial(plan.run, *args, **kwargs), copies)
        result = plain(work)
    if tuple(result.shape) != tuple(spec.shape):
        raise RuntimeError(
            f"{plan.name}: the result has shape {tuple(result.shape)}, and the tensor it is "
            f"written into is {spec}. "
            "Call the form that returns a new tensor."
        )
    back = box(result, spec.with_sbp(everywhere), spec)
    with HookOff():
        _Tensor.copy_(target, back)
    if observers:
        for observe in observers:
            observe(plan, [t._spec for t in tensors], (spec,))
    return target if out is not None else None
