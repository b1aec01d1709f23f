"""Planning of a call: choose a signature and record in a plan what to do.

The op's rule gives candidate signatures, and ``rules.choose`` picks the cheapest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_fields
from typing import Any

import torch

from mirrored.transports.default import current

from ...movement.grad_mode import tracks
from ...movement.sparse_parts import is_sparse
from ...movement.world import my_coordinate
from ...rules import table
from ...rules.candidates import candidates
from ...rules.choose import Choice, choose
from ...rules.fused_reduce_scatter import FORM as FUSED_REDUCE_SCATTER
from ...rules.fused_reduce_scatter import fused_axes
from ...rules.notation.holds import is_integral
from ...rules.raising import IN_BACKWARD, may_differ, may_differ_in_backward, may_raise
from ...rules.signature import Call, Operand
from ...spec import Layout, TensorSpec
from ...spec.tracer import callbacks
from ..plans.arguments import tensors_of, with_tensors
from ..plans.plan import Answer, ByFacts, OtherCall, OutLayout, Plan, list_ops
from ..plans.shards import HookOff, common_placement, is_global, refuse_other_views
from ..running import outside_ranks
from ..running.empty_shards import wrap_for_empty_shards
from ..running.on_shards import ByForm, InPlaceOnCopy, OnShards
from . import autocast
from .any_size import all_whole, out_layouts
from .functions.call_rewrites import (
    as_leaf,
    as_overload,
    first_by_position,
    numbers_passed_as_tensors,
    reshape_in_place,
    with_numbers,
)
from .functions.outs import into_out
from .functions.questions import OPERATORS
from .functions.torch_functions import TorchFunction
from .kernel_run import kernel_refusal
from .meetings import compare_plain
from .meta_run import (
    WRONG_META_KERNELS,
    has_meta_backward,
    is_refusal,
    logical_outputs,
    run_on_meta,
)
from .without_modes import without_modes
from .writes import written_operands

_ON_PLAN, _CHOOSE = callbacks("on_plan"), callbacks("choose")

_Tensor = torch.Tensor


def make_plan(
    function: TorchFunction, args: tuple, kwargs: dict, by_facts: bool, for_any_size: bool
) -> Plan:
    """Make the plan of ``function`` called with these arguments; the hook caches it.

    Args:
        function: the resolved torch function.
        args: positional arguments of the call.
        kwargs: named arguments of the call.
        by_facts: whether the hook's key for this call includes more facts, namely the values of
            floats or whether gradients are needed, because an earlier ``ByFacts`` plan requested
            them.
        for_any_size: whether the plan may be one that serves all sizes.
    """
    tensors = tensors_of(args, kwargs)
    for x in tensors:
        refuse_other_views(x, function.name)
    plan = _plan_without_row(function, args, kwargs)
    if plan is None:
        planning = _Planning(function, args, kwargs, tensors, for_any_size)
        with without_modes():
            # Planning runs ops on meta tensors, which no mode or hook of the user may see.
            plan = planning.under_autocast(planning.plan(by_facts))
    # A tracer that chooses signatures may choose otherwise next time, so its plans are not cached.
    plan.kept = plan.kept and not _CHOOSE
    for notify in _ON_PLAN:
        notify(plan)
    return compare_plain(plan, function, args, tensors)


def _plan_without_row(function: TorchFunction, args: tuple, kwargs: dict) -> Plan | None:
    """Return the plan of a call that is not planned by a rule, else None.

    Such a call is passed to another function (``OtherCall``): a foreach op, a call with ``out=``,
    one whose arguments must first be put into another form, or a function whose ``call`` is set.
    """
    if function.call is not None:
        return OtherCall(function.name, function.call, function.kind == "open")
    if kwargs and not isinstance(function.run, OPERATORS):
        # Before all other rewrites, which read the first arguments by position.
        by_position = first_by_position(function.name, function.run, args, kwargs)
        if by_position is not None:
            return OtherCall(function.name, by_position)
    for prefix, plan_list_op in list_ops.items():
        if function.name.startswith(prefix):
            plan = plan_list_op(function, args, kwargs)
            if plan is not None:
                return plan
    if kwargs.get("requires_grad") and not isinstance(function.run, OPERATORS):
        return OtherCall(function.name, as_leaf(function.run))
    if kwargs and any(kwargs.get(name) is not None for name in function.outs):
        write_out = into_out(function.name, function.run, function.outs, args, kwargs)
        return OtherCall(function.name, write_out)
    numbers = numbers_passed_as_tensors(function.name, args, kwargs)
    if numbers is not None:
        return OtherCall(function.name, with_numbers(function.run, numbers))
    if function.row is not None and isinstance(function.run, OPERATORS):
        call = as_overload(function.run, args, kwargs)
        return None if call is None else OtherCall(function.name, call)
    return None


class _Planning:
    """The planning of one call: its operands, the op's rule, and the methods that make the plan."""

    def __init__(
        self, function: TorchFunction, args: tuple, kwargs: dict, tensors: list, any_size: bool
    ) -> None:
        self.function, self.tensors, self.any_size = function, tensors, any_size
        self.placement = common_placement(function.name, tensors)
        self.specs = tuple(self._spec_of(t) for t in tensors)
        operands = tuple(Operand(i, spec) for i, spec in enumerate(self.specs))
        self.call = Call(function.name, *with_tensors(args, kwargs, operands), operands)
        self.call.inplace = function.inplace
        self.call.tracked = tracks(tensors)
        self.row = table.find_row(function.name)
        self.outside = my_coordinate(self.placement) is None
        self.covers_world = self.placement.size == current().size
        self.is_recorded = current().rank < 0  # by a process that is not one of the ranks
        # Few ops run on sparse meta tensors, and their results depend on which entries exist.
        with HookOff():
            self.is_sparse = any(map(is_sparse, tensors))

    def _spec_of(self, t: Any) -> TensorSpec:
        """Return the spec of ``t``; a plain tensor counts as B on the placement of the call."""
        if is_global(t):
            return t._spec
        return TensorSpec.laid(Layout.whole(self.placement), t.shape, t.dtype)

    def plan(self, by_facts: bool) -> Plan:
        """Return the plan by the op's row in the rule table; without a row, one on whole tensors.

        ``by_facts`` is as in ``make_plan``: whether the hook's key includes more facts. If it is
        False, the plan may be a ``ByFacts``, which makes the hook look again with such a key.
        """
        if self.row is None:
            return self._plan_on_whole()
        facts_plan = None if by_facts else self._facts_plan(self.row)
        if facts_plan is not None and not all_whole(self.specs):
            return facts_plan
        plan = self._plan_by_row(self.row)
        # A plan for whole operands that passes the arguments unchanged depends on no facts.
        return plan if facts_plan is None or plan.any_size else facts_plan

    def under_autocast(self, plan: Plan) -> Plan:
        """Return ``plan``, or a plan that casts the operands as autocast would and calls again.

        A cast is needed where torch's own casts on the shards do not suffice: for forms, for
        addends of a P tensor in a lower precision, and where ranks outside the placement would not
        know the dtypes of the results.
        """
        device = self.placement.type
        if not isinstance(plan, OnShards) or not autocast.is_on(device):
            return plan
        dtype = autocast.dtype_of(self.call, device)
        unknown = dtype is not None and not (plan.any_size and self.covers_world)
        # A cast to a lower precision would round addends, which may be far larger than their sum.
        unknown |= dtype is not None and any(e.is_partial for s in self.specs for e in s.sbp)
        if not unknown and not isinstance(plan, ByForm):
            return plan
        run = autocast.cast_first(self.function.run, device, dtype)
        return OtherCall(self.function.name, run)

    def _facts_plan(self, row: table.Row) -> Plan | None:
        """Return a plan that requests a key with more facts, or None if the key is enough.

        The facts are the values of floats, and whether gradients are needed.
        """
        # The rules of P(max) and P(min) depend on the signs of numbers, and apply only without
        # gradients.
        extreme = any(e.is_extreme for spec in self.specs for e in spec.sbp)
        by_value = row.by_value or row.localize is not None or extreme
        by_value = by_value and _has_floats((self.call.args, self.call.kwargs))
        by_grad = row.makes_extremes or extreme
        return ByFacts(self.function.name, by_value, by_grad) if by_value or by_grad else None

    # -- by the op's row ---------------------------------------------------------------------------

    def _plan_by_row(self, row: table.Row) -> Plan:
        """Return the plan according to ``row``, the op's row in the rule table.

        If the rule does not fit the call, the plan runs the op on whole tensors on every rank.
        """
        call = self.call
        outs, result = logical_outputs(self.function.run, row, call)
        if outs is None:
            return self._plan_on_whole(kept=not is_refusal(result))
        if not outs:  # a query about shapes or dtypes, which the meta run has answered
            return Answer(call.name, result)
        if call.inplace and outs[0].shape != self.specs[0].shape:
            if self.function.reshapes:
                return OtherCall(call.name, reshape_in_place(call.name))
            # Some meta kernels reshape the target, or return a tensor of another shape.
            raise outside_ranks.too_small(self.specs[0].shape, outs[0].shape)
        call.outs = outs
        choice = self._choose_signature(row)
        data_dependent = any(out.data_dependent for out in outs)
        # Only a form can return the logical shapes of outputs whose shape depends on data.
        if choice is None or (data_dependent and choice.form is None):
            return self._plan_on_whole()
        if choice.form is None:
            choice = self._fuse_sum(choice)
        plan = self._plan_on_shards(row, choice, data_dependent)
        plan.follow = self._follow_function(plan, row, data_dependent)
        self._refuse_as_kernels(plan, data_dependent)
        return plan.finish()

    def _choose_signature(self, row: table.Row) -> Choice | None:
        """Return the signature that is cheapest from the operands' layouts, or None if none fits.

        A tracer that is registered for ``choose`` may choose instead.
        """
        by_axis = candidates(row, self.call, self.placement)
        if by_axis is None:
            return None
        # An in-place op cannot change the layout of its target.
        pin = self.specs[0].sbp if self.call.inplace else None
        if _CHOOSE:
            choice = _CHOOSE[-1](self.call, self.specs, by_axis, pin)
            if choice is not None:
                return choice
        return choose(self.call, self.specs, by_axis, pin)

    def _fuse_sum(self, choice: Choice) -> Choice:
        """Return ``choice``, with the reduction of the first operand fused into the op if possible.

        Boxing the first operand may end in a sum over ranks. The fused form takes the addends as
        they are and sums inside the op.
        """
        boxed_specs = [s.with_sbp(sbp) for s, sbp in zip(self.specs, choice.ins, strict=True)]
        axes = fused_axes(self.call, self.specs, boxed_specs)
        if axes is None:
            return choice
        ins = (self.specs[0].sbp, *choice.ins[1:])
        return replace_fields(choice, ins=ins, form=FUSED_REDUCE_SCATTER, form_axes=axes)

    def _plan_on_shards(self, row: table.Row, choice: Choice, data_dependent: bool) -> OnShards:
        """Return the plan that runs the op on shards by the signature ``choice``.

        ``data_dependent`` says whether the shape of some output depends on values.
        """
        plan = self._new_plan(OnShards if choice.form is None else ByForm)
        plan.choice = choice
        by_form = choice.form is not None
        plan.may_differ = not self.outside and may_differ(
            self.call, choice.ins, by_form, self.placement
        )
        plan.announces_error = self._must_announce_error(plan, data_dependent)
        self._set_boxes(plan, [Layout.of(self.placement, sbp) for sbp in choice.ins])
        plan.may_differ_in_backward = not self.outside and may_differ_in_backward(
            self.call, choice.ins, self.placement
        )
        plan.outs = tuple(
            TensorSpec.of(self.placement, sbp, out.shape, out.dtype)
            for out, sbp in zip(self.call.outs, choice.outs, strict=True)
        )
        if isinstance(plan, ByForm):
            plan.data_dependent = data_dependent
            plan.operands = tuple(
                spec.with_sbp(sbp) for spec, sbp in zip(self.specs, choice.ins, strict=True)
            )
        elif not self._mark_any_size(plan, row, choice) and row.localize is not None:
            self._localize(plan, row)
        return plan

    def _mark_any_size(self, plan: OnShards, row: table.Row, choice: Choice) -> bool:
        """Mark ``plan`` as one for tensors of all sizes if sizes do not affect it.

        Returns whether it was marked.
        """
        if not self.any_size or choice.form is not None:
            return False
        if any(entry.is_extreme for sbp in choice.ins for entry in sbp):
            return False  # P(max) and P(min) rules look at the signs of numbers, integers included
        # A rank outside makes such outputs by `make_planned_outputs`, which needs the call's sizes.
        if self.outside and row.known_outs(self.call):
            return False
        if self.function.reshapes:
            return False  # e.g. squeeze_: which dims it drops depends on the sizes of the call
        if all_whole(self.specs) and not self.call.inplace:
            layouts: tuple[OutLayout, ...] | None = (OutLayout(Layout.whole(self.placement)),)
        else:
            layouts = out_layouts(row, self.call, choice, self.call.outs, self.placement)
            moved = plan.boxes or plan.adopted or self.outside
            if layouts is None or (row.localize is not None and (moved or not row.sizing)):
                return False
        plan.outs, plan.any_size = layouts, True
        # The key of a plan for whole operands lacks the values of floats, so shapes that depend on
        # them, as on the scales of an interpolation, are not known.
        plan.known_shapes = not (row.by_value and all_whole(self.specs))
        return True

    def _localize(self, plan: OnShards, row: table.Row) -> None:
        """Replace logical sizes among the arguments of ``plan`` by those of this rank's shard.

        For ``x.view(8, 4)`` whose result is split over two ranks by ``S(0)``, torch is called with
        (4, 4). ``row`` is the op's row, which knows which arguments are sizes.
        """
        assert row.localize is not None and plan.choice is not None
        coordinate, call = my_coordinate(self.placement), self.call
        ins = [
            spec.with_sbp(sbp).local_shape(coordinate)
            for spec, sbp in zip(self.specs, plan.choice.ins, strict=True)
        ]
        outs = [spec.local_shape(coordinate) for spec in plan.outs]  # type: ignore[union-attr]
        plan.template = row.localize(call, ins, outs)
        (head, *rest), named = plan.template
        moved = plan.boxes or plan.adopted or plan.inplace
        # Then the hook can pass these sizes itself, without running the plan in Python.
        if not moved and not named and len(self.specs) == 1 and head is call.args[0]:
            plan.sizes = _as_passed(call, rest)

    # -- whole -------------------------------------------------------------------------------------

    def _plan_on_whole(self, kept: bool = True) -> Plan:
        """Return a plan by which every rank boxes the operands to B and computes the whole op.

        This is correct for every op, but slow.

        Args:
            kept: whether another call with the same key would get this plan too. If the row does
                not fit this call, it may still fit a call of other sizes.
        """
        whole = Layout.whole(self.placement)
        target_moves = self.call.inplace and self.specs[0].layout is not whole
        plan = self._new_plan(InPlaceOnCopy if target_moves else OnShards)
        self._set_boxes(plan, [whole] * len(self.specs))
        plan.may_differ_in_backward = not self.outside and may_differ_in_backward(
            self.call, [whole.sbp] * len(self.specs), self.placement
        )
        if self.call.inplace:
            plan.outs = (self.specs[0],)
        elif self.row is None or all_whole(self.specs):
            plan.any_size, plan.outs = True, (OutLayout(whole),)
        needs_no_meta_run = self.covers_world and not self.is_recorded
        meta_run = None if needs_no_meta_run else run_on_meta(self.function.run, self.call)
        refused = is_refusal(meta_run)
        plan.kept = kept and not refused
        meta_is_wrong = self.placement.type == "cpu" and self.call.name in WRONG_META_KERNELS
        unknown = meta_is_wrong or isinstance(meta_run, Exception)
        plan.follow = self._follow_function(plan, None, unknown)
        # If the meta run refused a write, ranks outside do not run the op and are sent no result:
        # they must be sent the error.
        plan.announces_error = self._must_announce_error(plan, unknown) or (
            plan.inplace and refused
        )
        self._refuse_as_kernels(plan, unknown)
        return plan.finish()

    # -- parts -------------------------------------------------------------------------------------

    def _new_plan(self, kind: type[OnShards]) -> OnShards:
        """Return an empty plan of this ``kind``, which takes plain tensors of the call as B."""
        run = wrap_for_empty_shards(self.function.name, self.function.run)
        plan = kind(self.function.name, run, self.call, self.placement)
        plan.adopted = tuple(i for i, t in enumerate(self.tensors) if not is_global(t))
        plan.outside = self.outside
        return plan

    def _set_boxes(self, plan: OnShards, layouts: Sequence[Layout]) -> None:
        """Record in ``plan`` the operands that must be boxed to get ``layouts``, one per operand.

        If the op writes to an operand that is boxed, it is recorded to be boxed back afterwards.
        """
        # Layouts are interned, so they can be compared by identity.
        pairs = enumerate(zip(self.specs, layouts, strict=True))
        plan.boxes = tuple((i, layout) for i, (spec, layout) in pairs if spec.layout is not layout)
        if plan.boxes:
            written = written_operands(self.function.written, self.call, self.row)
            plan.writes = tuple(i for i, _ in plan.boxes if i in written)

    def _follow_function(
        self, plan: OnShards, row: table.Row | None, unknown: bool
    ) -> outside_ranks.Follow | None:
        """Return the function by which ranks outside the placement follow the op, or None.

        A plan calls it in place of just computing the op. A rank outside the placement holds no
        values and follows the op on ``meta`` tensors. Where only a run shows the result's shape
        (``unknown``), the first rank of the placement sends it to the ranks outside, so the
        function is set on the ranks inside too.
        """
        unknown = unknown or self.is_sparse
        if self.is_recorded and unknown and not plan.inplace:
            plan.by_values = True
            return None
        if self._announces_result(plan, unknown):
            return outside_ranks.announce_result(self.placement.first_rank, self.outside)
        if not self.outside:
            return None
        if unknown and not self.covers_world:
            return outside_ranks.record_stand_in_node
        if row is not None and row.known_outs(self.call):
            return outside_ranks.make_planned_outputs(
                plan.name,
                self._exact_outs(plan),
                [not out.non_differentiable for out in self.call.outs],
            )
        if "sparse" in self.call.params and self.call.get("sparse", False):
            # Its backward gives a sparse gradient, as on other ranks.
            return outside_ranks.run_on_meta
        # The backward pass of IN_BACKWARD ops needs values, at least when differentiated again.
        if self.call.name not in IN_BACKWARD and has_meta_backward(self.function.run, self.call):
            only_writes = self._only_writes(plan, row)
            return outside_ranks.write_on_meta if only_writes else outside_ranks.run_on_meta
        return (
            outside_ranks.write_with_stand_in_node
            if plan.inplace
            else outside_ranks.run_with_stand_in_node
        )

    def _only_writes(self, plan: OnShards, row: table.Row | None) -> bool:
        """Return whether the op, planned by ``row``, only writes values to its first operand."""
        if row is None or not row.is_elementwise or type(plan) is not OnShards:
            return False
        return plan.inplace and not self.function.reshapes

    def _must_announce_error(self, plan: OnShards, unknown: bool) -> bool:
        """Return whether ranks outside the placement must be sent the error if the op raises.

        They follow the program without values, and must raise where the ranks inside do. If the
        shape of the result is sent to them (``unknown``), that message carries an error too, and no
        other is needed.
        """
        if self.covers_world or self._announces_result(plan, unknown):
            return False
        return may_raise(self.call, self.placement) or self._writes_fractions()

    def _writes_fractions(self) -> bool:
        """Return whether numbers with fractions are written into integers, which most ops refuse.

        Meta kernels, such as that of ``mul_``, do not refuse it, so ranks outside would not raise.
        """
        if not self.call.inplace or not is_integral(self.specs[0].dtype):
            return False
        integers = all(is_integral(spec.dtype) for spec in self.specs)
        return not integers or _has_floats((self.call.args, self.call.kwargs))

    def _announces_result(self, plan: OnShards, unknown: bool) -> bool:
        """Return whether ranks outside the placement are sent the result's shape, or the error.

        ``unknown`` says whether only a run of the op shows the shape.
        """
        return (unknown or self.is_sparse) and not self.covers_world and not plan.inplace

    def _refuse_as_kernels(self, plan: OnShards, unknown: bool) -> None:
        """Make ``plan`` raise if the op raises on the other ranks for the dtypes of its operands.

        This matters on ranks that run the op on meta tensors or on empty shards, where torch may
        not raise. The plan boxes the operands before it raises, as the other ranks do.
        """
        if self.is_recorded or self.is_sparse or self.placement.type != "cpu":
            return
        # Other forms than "seeded" run kernels that support other dtypes than torch's.
        form = None if plan.choice is None else plan.choice.form
        if form not in (None, "seeded") or self._announces_result(plan, unknown):
            return
        if not self.outside and not self._has_empty_shard(plan):
            return
        refusal = kernel_refusal(self.function.run, self.call)
        if refusal is None:
            # An empty operand may be why the kernels accept the call, so a later call plans again.
            plan.kept = plan.kept and all(spec.numel for spec in self.specs)
            return

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise type(refusal)(*refusal.args)

        plan.kept = False
        if self.outside:
            plan.follow = refuse
        else:
            plan.function = refuse

    def _has_empty_shard(self, plan: OnShards) -> bool:
        """Return whether this rank runs the op on an empty shard of a tensor that is not empty."""
        if plan.choice is None:  # every rank runs the op on whole tensors
            return False
        coordinate = my_coordinate(self.placement)
        return any(
            spec.numel and 0 in spec.with_sbp(sbp).local_shape(coordinate)
            for spec, sbp in zip(self.specs, plan.choice.ins, strict=True)
        )

    def _exact_outs(self, plan: OnShards) -> list[TensorSpec]:
        """Return the specs of the outputs for the sizes of this very call.

        A plan for all sizes has only their layouts.
        """
        assert plan.choice is not None
        return [
            TensorSpec.of(self.placement, sbp, out.shape, out.dtype)
            for out, sbp in zip(self.call.outs, plan.choice.outs, strict=True)
        ]


def _has_floats(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_floats, value))
    if isinstance(value, dict):
        return any(map(_has_floats, value.values()))
    return value.__class__ is float or value.__class__ is complex


def _as_passed(call: Call, local_arguments: Sequence[Any]) -> tuple:
    """Return the arguments after the tensor, in the form in which the caller passed them.

    ``local_arguments`` are the call's, with the sizes of the shard. Sizes that the caller passed
    one by one stay separate, because torch parses a tuple of sizes more slowly.
    """
    one_by_one = len(call.args) > 1 and call.args[1].__class__ is int
    return (
        local_arguments[0]
        if one_by_one and [r.__class__ for r in local_arguments] == [tuple]
        else tuple(local_arguments)
    )
