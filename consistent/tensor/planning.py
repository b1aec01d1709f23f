"""A call not met before: the op's row gives signatures, ``boxing.choose`` picks, the plan is
written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch.autograd import forward_ad

from mirrored import comm

from ..boxing.choose import Choice, choose
from ..boxing.run import here
from ..rules import table
from ..rules.after_sum import FORM as AFTER_SUM
from ..rules.after_sum import joins_sum
from ..rules.signature import Call, Operand
from ..spec import B, NdSbp, Placement, TensorSpec
from .arguments import collect, replace
from .candidates import candidates
from .execute import execute
from .key import key_of
from .meta import has_meta_backward, logical_outputs, on_meta
from .naming import Known, know
from .plan import (
    MAX_PLANS,
    Plan,
    choices,
    clear_plans,
    exact_plans,
    handlers,
    list_ops,
    watchers,
)
from .shards import is_global, refuse_mirrored
from .wrapped import NUMBERS, into_out, reshaped_in_place, with_hook_off, with_numbers

_Tensor = torch.Tensor


def make_plan(func: Callable[..., Any], args: tuple, kwargs: dict) -> Plan:
    """The plan of ``func(*args, **kwargs)``."""
    known = know(func)
    met: list[Any] = []
    collect((args, kwargs), met)
    for x in met:
        refuse_mirrored(x, known.name)
    plan = _make_plan(known, args, kwargs, key_of(func, args, kwargs))
    plan.kept = known.kind != "raw"
    for watch in watchers:
        watch(plan)
    return plan


def _make_plan(known: Known, args: tuple, kwargs: dict, key: tuple) -> Plan:
    if known.name in handlers:
        return Plan("handler", known.name, handlers[known.name])
    if known.kind == "open":
        return Plan("open", known.name, known.run)
    for prefix, plan_list_op in list_ops.items():
        if known.name.startswith(prefix):
            return plan_list_op(known, args, kwargs)
    if known.kind == "raw":
        return Plan("handler", known.name, with_hook_off(known.run))
    if "out" in kwargs and kwargs["out"] is not None:
        return Plan("handler", known.name, into_out(known.run))
    if kwargs and any(isinstance(kwargs.get(name), _Tensor) for name in NUMBERS):
        return Plan("handler", known.name, with_numbers(known.run))
    tensors: list[Any] = []
    collect(args, tensors)
    collect(tuple(kwargs.values()), tensors)
    placement = common_placement(known.name, tensors)
    specs = tuple(
        t._spec
        if is_global(t)
        else TensorSpec.of(placement, (B,) * placement.ndim, t.shape, t.dtype)
        for t in tensors
    )
    operands = tuple(Operand(i, spec) for i, spec in enumerate(specs))
    source = iter(operands)
    call = Call(known.name, replace(args, source), replace(kwargs, source), operands)
    call.inplace = known.inplace
    plan = Plan("whole", known.name, known.run)
    plan.placement, plan.inplace, plan.call = placement, known.inplace, call
    plan.adopt = tuple(i for i, t in enumerate(tensors) if not is_global(t))
    row = table.find(known.name)
    if row is not None:
        if key[-1].__class__ is not _Facts:
            extreme = any(e.is_extreme for spec in specs for e in spec.sbp)
            by_value = bool((row.by_value or row.localize or extreme) and _floats(args, kwargs))
            if by_value or row.forward or extreme:
                run = _by_facts(known, key, by_value, row.forward or extreme)
                return Plan("handler", known.name, run)
        call.tracked = tracks(tensors)
        _apply_row(plan, row, specs, call, key)
    if plan.kind == "whole":
        plan.told = placement.size < comm.current().size and on_meta(plan.run, call) is None
        _plan_whole(plan, specs)
    if row is not None and plan.boxes:
        written = row.written(call)
        plan.put_back = tuple(entry for entry in plan.boxes if entry[0] in written)
    plan.outside = here(placement) is None
    if plan.outside:
        plan.fast = False
        if not plan.told and plan.kind != "whole" and row is not None and row.told_outs(call):
            plan.said = tuple(not out.fixed for out in call.outs)
        plan.stand_in = not has_meta_backward(plan.run, call)
        if plan.kind == "direct":
            plan.kind = "run"
    return plan


class _Facts(tuple):
    """What else the plan of a call depends on, as the last part of a key: its float arguments, and
    whether gradients are asked for."""

    __slots__ = ()


def tracks(tensors: Sequence[_Tensor]) -> bool:
    """Whether autograd, reverse or forward mode, follows an op on ``tensors``: the same on every
    rank."""
    asked = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return asked or forward_ad._current_level >= 0


def _floats(args: tuple, kwargs: dict) -> tuple:
    found: list[float] = []

    def visit(value: Any) -> None:
        if value.__class__ is float or value.__class__ is complex:
            found.append(value)
        elif value.__class__ is tuple or value.__class__ is list:
            for item in value:
                visit(item)

    visit(args)
    visit(tuple(kwargs.values()))
    return tuple(found)


def _by_facts(known: Known, key: tuple, by_value: bool, by_grad: bool) -> Callable[..., Any]:
    """Plans of a call that depend on more than the key: they are looked up again, by that too."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        if by_grad:
            collect((args, kwargs), tensors)
        floats = _floats(args, kwargs) if by_value else ()
        exact = (*key, _Facts((tracks(tensors) if by_grad else None, *floats)))
        plan = exact_plans.get(exact)
        if plan is None:
            if len(exact_plans) >= MAX_PLANS:
                clear_plans()
            plan = exact_plans[exact] = _make_plan(known, args, kwargs, exact)
            for watch in watchers:
                watch(plan)
        return execute(plan, args, kwargs)

    return run


def _plan_whole(plan: Plan, specs: Sequence[TensorSpec]) -> None:
    everywhere = (B,) * plan.placement.ndim
    plan.boxes = tuple(
        (i, spec.with_sbp(everywhere)) for i, spec in enumerate(specs) if spec.sbp != everywhere
    )
    if plan.inplace and not plan.boxes:
        plan.kind, plan.outs = "direct" if not plan.adopt else "run", (specs[0],)
        plan.fast = plan.kind == "direct"


def _apply_row(
    plan: Plan, row: table.Row, specs: tuple[TensorSpec, ...], call: Call, key: tuple
) -> None:
    """Turn ``plan`` into what the row says, or leave it whole where the row does not fit."""
    level = (
        key[0],
        plan.placement,
        tuple((s.sbp, tuple(n == 1 for n in s.shape), s.dtype) for s in specs),
        tuple(_shapeless(part) for part in key[1:]),
    )
    outs, result = logical_outputs(plan.run, row, call, level)
    if outs is None:
        return
    if not outs:  # a question about shapes or dtypes, answered by the meta run
        plan.kind, plan.constant = "constant", result
        return
    if call.inplace and outs[0].shape != specs[0].shape:
        plan.kind, plan.run = "handler", reshaped_in_place(call.name)
        return
    call.outs = outs
    choice = _choose(plan, row, specs, call, level)
    counted = any(out.counted for out in outs)
    if choice is None or (counted and choice.form is None):
        return
    placement = plan.placement
    plan.counted, plan.told = counted, counted and placement.size < comm.current().size
    plan.choice = choice
    plan.specs = tuple(spec.with_sbp(s) for spec, s in zip(specs, choice.ins, strict=True))
    plan.outs = tuple(
        TensorSpec.of(placement, s, out.shape, out.dtype)
        for out, s in zip(outs, choice.outs, strict=True)
    )
    joined = joins_sum(call, specs, plan.specs) if choice.form is None else None
    if joined is not None:  # the op does the last sum of boxing its first operand itself
        choice = plan.choice = replace_fields(choice, form=AFTER_SUM, form_axes=joined)
        plan.specs = (specs[0], *plan.specs[1:])
    plan.boxes = tuple(
        (i, plan.specs[i]) for i in range(len(specs)) if plan.specs[i] is not specs[i]
    )
    if choice.form is not None:
        plan.kind = "form"
    elif row.localize is not None:
        at = here(placement)
        ins = [spec.local_shape(at) for spec in plan.specs]
        plan.template = row.localize(call, ins, [spec.local_shape(at) for spec in plan.outs])
        plan.kind = "template"
        moved = plan.boxes or plan.adopt or plan.inplace
        (head, *rest), named = plan.template
        if not moved and not named and head.__class__ is Operand and len(specs) == 1:
            plan.fast, plan.sizes = head is call.args[0], _as_given(call, rest)
    else:
        plan.kind = "run" if plan.boxes or plan.adopt else "direct"
        plan.fast = plan.kind == "direct"


def _as_given(call: Call, rest: Sequence[Any]) -> tuple:
    """The arguments after the tensor; sizes that came one by one go so, as torch reads a tuple of
    them slower."""
    one_by_one = len(call.args) > 1 and call.args[1].__class__ is int
    return rest[0] if one_by_one and [r.__class__ for r in rest] == [tuple] else tuple(rest)


def _choose(
    plan: Plan, row: table.Row, specs: tuple[TensorSpec, ...], call: Call, level: tuple
) -> Choice | None:
    """Second cache level: where sizes decide nothing, the choice holds for every shape with the
    same pattern."""
    placement = plan.placement
    # Rules written as functions may look at sizes, so only notation rows are remembered across
    # shapes.
    by_letters = isinstance(row.rule, str)
    remembered = choices.get(level) if by_letters else None
    if remembered is not None:
        return remembered
    by_axis = candidates(row, call, placement)
    if by_axis is None:
        return None
    pin: NdSbp | None = specs[0].sbp if plan.inplace else None
    choice = choose(call, specs, by_axis, pin)
    if by_letters and choice is not None and not choice.by_size:
        if len(choices) >= MAX_PLANS:
            choices.clear()
        choices[level] = choice
    return choice


def _shapeless(part: Any) -> Any:
    if part.__class__ is TensorSpec:
        return None
    if part.__class__ is tuple:
        return tuple(_shapeless(item) for item in part) if part[:1] != (_Tensor,) else None
    return part


def common_placement(name: str, tensors: Sequence[Any]) -> Placement:
    """The one placement of the global tensors among ``tensors``."""
    first = None
    for t in tensors:
        if is_global(t):
            if first is None:
                first = t
            elif t._spec.placement != first._spec.placement:
                raise RuntimeError(
                    f"{name}: its tensors are on different placements, and boxing does not move "
                    "tensors between "
                    f"placements by itself.\n  One is {first._spec}, another is {t._spec}.\n"
                    "  Move one of them first: x.to_global(placement=y.placement)."
                )
    assert first is not None
    return first._spec.placement
