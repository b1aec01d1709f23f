"""Plans that run an op on shards: box the operands, run the op, attach specs to the outputs.

Plain tensors among the operands become B global tensors first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mirrored.transports.default import current

from ...forms import FORMS, RAISE_FIRST, Shards
from ...movement import check_mode
from ...movement.boxed import box
from ...movement.world import excludes_others
from ...rules.choose import Choice
from ...rules.raising import DIVISIONS
from ...rules.signature import Call
from ...spec import Layout, Placement, TensorSpec
from ...spec.nested import tensors_in
from ...spec.tracer import callbacks
from ..plans.arguments import fill, with_tensors
from ..plans.plan import (
    BOXED,
    FAST,
    RUN,
    LengthSource,
    OutLayout,
    Plan,
)
from ..plans.shards import (
    HookOff,
    adopt,
    attach,
    attach_each,
    is_global,
    plain,
    promote,
    rebox,
    retype,
    whole_result,
)
from . import moved_views
from .agreed import all_ranks, ranks_of, run_form_with_shared_errors, run_with_shared_errors
from .operands import box_operands
from .outside_ranks import Follow, follow_by_values
from .refused_gradients import watch_backward_errors
from .user_code import current_user_call, write_into_plain
from .views import is_view
from .writes import count_write

_Tensor = torch.Tensor
_ON_OP_BEGIN, _ON_OP_END = callbacks("on_op_begin"), callbacks("on_op_end")


class OnShards(Plan):
    """Plan that boxes operands to the planned layouts and calls torch's function on the shards.

    The commonest kind. The planner fills in the attributes and then calls ``finish``.
    """

    kind = "run"

    def __init__(
        self, name: str, function: Callable[..., Any], call: Call, placement: Placement
    ) -> None:
        super().__init__(name)
        self.function, self.call, self.placement = function, call, placement
        self.inplace = call.inplace
        self.choice: Choice | None = None  # None: every rank computes the whole
        self.adopted: tuple[int, ...] = ()  # indices of plain tensors, which are taken as B
        self.boxes: tuple[tuple[int, Layout], ...] = ()
        self.writes: tuple[int, ...] = ()  # indices of boxed operands that the op writes to
        self.template: tuple[tuple, dict] | None = None  # arguments with sizes of the shard
        self.outside = False  # this rank is not in the placement and follows on meta tensors
        self.follow: Follow | None = None  # called in place of just computing (outside_ranks)
        self.by_values = False  # a program is recorded, and values decide the result's shapes
        self.may_differ = False  # the op may raise on some ranks and not on others
        self.may_differ_in_backward = False
        self.announces_error = False  # the op may raise, and ranks outside must be sent the error

    @property
    def is_whole(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if every rank computes the op on whole tensors, because no rule fits."""
        return self.choice is None

    @property
    def is_one_call(self) -> bool:
        """True if the plan is one call of the function plus attaching the specs of its outputs.

        The C++ hook may run such a plan itself. Plain tensors are then passed as they are.
        """
        if self.boxes or self.outside or self.follow or (self.inplace and 0 in self.adopted):
            return False
        return self.template is None or self.sizes is not None

    @property
    def is_one_call_once_boxed(self) -> bool:
        """True if the plan is one call of the function after the operands in ``boxes`` were boxed.

        The C++ hook then calls ``boxed`` and does the rest itself.
        """
        # Subclasses replace `compute` or `run`, which the hook would not call.
        if type(self) is not OnShards or self.outside or self.follow or self.is_whole:
            return False
        writes = self.writes or (self.inplace and any(index == 0 for index, _ in self.boxes))
        return not (self.adopted or writes or self.template or is_view(self))

    def finish(self) -> OnShards:
        """Set ``way``, how the hook runs this plan, from the other attributes; return the plan."""
        self.adopts = bool(self.adopted)
        if not (self.may_differ or self.announces_error or self.may_differ_in_backward):
            once_boxed = BOXED if self.is_one_call_once_boxed else RUN
            self.way = FAST if self.is_one_call else once_boxed
        return self

    def boxed(self, tensors: list) -> list:
        """Box the operands listed in ``boxes``, and replace them in ``tensors`` by plain shards.

        Returns the list ``tensors``. For simple plans the C++ hook calls this, not ``run``.
        """
        check_mode.set_current_op(self.name)
        box_operands(tensors, self.boxes)
        return tensors

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        for notify in _ON_OP_BEGIN:
            notify(self)
        first = tensors[0]
        if self._writes_into_plain():
            return write_into_plain(self.function, args, kwargs, tensors)
        for index in self.adopted:
            convert = promote if self.inplace and index == 0 else adopt
            tensors[index] = convert(tensors[index], self.placement, self.name)
        if self.inplace and first._moved_view:
            return moved_views.write_through(self, args, kwargs, first)
        operands = list(tensors)
        specs = [t._spec for t in operands]
        if self.boxes:
            self.boxed(tensors)
        for index, layout in self.boxes:
            tensors[index] = attach(tensors[index], specs[index].with_layout(layout))
        out = self._run_wrapped(tensors, args, kwargs)
        for index in self.writes:
            self._box_back(tensors[index], operands[index])
        if moved_views.alive:
            for index in (*((0,) if self.inplace else ()), *self.writes):
                count_write(operands[index])
        out, outs = self._attach_specs(out, specs, first)
        if self._returns_moved_view(first):
            out = moved_views.mark_moved_views(out, self, first, args, kwargs)
        for notify in _ON_OP_END:
            notify(self, operands, out, specs, outs)
        return out

    def _writes_into_plain(self) -> bool:
        """Return whether the op writes in place into a plain tensor that has to stay plain.

        That is so in user code that runs on plain tensors, such as a user's ``autograd.Function``.
        Elsewhere the target becomes global.
        """
        return self.inplace and 0 in self.adopted and current_user_call() is not None

    def _box_back(self, copy: Any, original: Any) -> None:
        """Box ``copy``, to which the op has written, and copy its value into ``original``.

        ``original`` is an operand, and ``copy`` the result of boxing it before the op ran.
        """
        if original._moved_view:
            moved_views.write_into_view(original, copy, self.name)
            return
        with torch.no_grad(), HookOff():
            _Tensor.copy_(original, box(plain(copy), copy._spec, original._spec))

    def _run_wrapped(self, tensors: list, args: tuple, kwargs: dict) -> Any:
        """Return the plain result of ``compute``, run with all that the plan wraps around it.

        That is: exchanging errors between ranks, and following the op on a rank outside the
        placement.
        """
        if self.outside:
            # Meta kernels may be written in Python, and would read the logical shape and device of
            # a global tensor there.
            tensors = [plain(t) for t in tensors]
        compute = partial(self.compute, tensors, args, kwargs)
        may_raise = not (self.name in DIVISIONS and _any_floats(tensors))
        # Rank -1 means that a program is captured, and nothing is sent.
        world = may_raise and self.announces_error and not excludes_others() and current().rank >= 0
        # Wrappers, from the inside out: the ranks of the placement exchange errors; hooks do so in
        # backward; a rank outside follows. The world exchanges errors outermost, so that the ranks
        # outside take part.
        if may_raise and self.may_differ:
            compute = self._with_agreement(compute, world)
        if self.may_differ_in_backward:
            compute = partial(watch_backward_errors, self.placement, compute, tensors[0])
        if self.by_values:
            compute = partial(self._compute_by_values, compute, tensors, args, kwargs)
        elif self.follow is not None:
            compute = partial(self.follow, compute, tensors)
        return run_with_shared_errors(all_ranks(), compute) if world else compute()

    def _compute_by_values(
        self, compute: Callable[[], Any], tensors: list, args: tuple, kwargs: dict
    ) -> Any:
        assert self.function is not None
        return follow_by_values(self.name, (self.function, args, kwargs), compute, tensors)

    def _with_agreement(self, compute: Callable[[], Any], world: bool) -> Callable[[], Any]:
        """Return ``compute`` wrapped so that the ranks of the placement exchange errors after it.

        ``world`` says that all ranks of the world exchange errors anyway. Then no wrapper is
        needed, unless ``compute`` runs a form: a form communicates, so its ranks exchange errors
        before that.
        """
        ranks, form = ranks_of(self.placement), None if self.choice is None else self.choice.form
        if form is not None:
            return partial(run_form_with_shared_errors, ranks, compute, form in RAISE_FIRST)
        return compute if world else partial(run_with_shared_errors, ranks, compute)

    def compute(self, tensors: list, args: tuple, kwargs: dict) -> Any:
        """Run torch's function on shards in the planned layouts; return its plain result.

        ``tensors`` are the shards, which replace the tensors in ``args`` and ``kwargs``.
        """
        assert self.function is not None
        with HookOff():
            if self.template is not None:
                args, kwargs = self.template
                return self.function(*fill(args, tensors), **fill(kwargs, tensors))
            if self.adopted or not self.is_one_call:
                args, kwargs = with_tensors(args, kwargs, tensors)
            return self.function(*args, **kwargs)

    def _attach_specs(
        self, out: Any, specs: Sequence[TensorSpec], first: Any
    ) -> tuple[Any, Sequence[TensorSpec]]:
        """Turn the plain result ``out`` into global tensors; return (result, its specs).

        ``specs`` are those of the operands, ``first`` is the first operand.
        """
        if self.inplace:  # x[i] = v returns None
            return (first if out is not None else None), (specs[0],)
        if self.is_whole:
            return whole_result(out, self.placement)
        if self.any_size:
            return _attach_by_layout(out, self.outs, specs)
        return retype(out, self.outs), self.outs  # type: ignore[arg-type, return-value]

    def _returns_moved_view(self, first: Any) -> bool:
        """Return whether the result is a copy that would be a view of ``first`` on one device.

        It is a copy because boxing moved the data, or ``first`` itself is such a copy.
        """
        if self.inplace or not is_view(self):
            return False
        return self._boxing_moves_view or getattr(first, "_moved_view", False)

    @property
    def _boxing_moves_view(self) -> bool:
        return bool(self.boxes) if self.is_whole else any(i == 0 for i, _ in self.boxes)

    def __repr__(self) -> str:
        boxes = ", ".join(f"{i} to {layout.sbp}" for i, layout in self.boxes)
        outs = ", ".join(
            str(o.layout.sbp if isinstance(o, OutLayout) else o.sbp) for o in self.outs
        ) or str(Layout.whole(self.placement).sbp)
        kind = "whole" if self.is_whole else self.kind
        return f"{self.name}: {kind}" + (f", box {boxes}" if boxes else "") + f" -> {outs}"


class ByForm(OnShards):
    """Plan that runs a form, this library's own implementation of the op on shards (``forms/``).

    The specs of the outputs are as planned, except for outputs whose shape depends on data.
    """

    kind = "form"

    def __init__(
        self, name: str, function: Callable[..., Any], call: Call, placement: Placement
    ) -> None:
        super().__init__(name, function, call, placement)
        self.operands: tuple[TensorSpec, ...] = ()  # specs of the operands when the form runs
        self.data_dependent = False  # the form returns (result, logical shapes of its tensors)

    @property
    def is_one_call(self) -> bool:
        return False

    @property
    def _boxing_moves_view(self) -> bool:
        return True

    def _compute_by_values(
        self, compute: Callable[[], Any], tensors: list, args: tuple, kwargs: dict
    ) -> Any:
        out = super()._compute_by_values(compute, tensors, args, kwargs)
        return (out, [tuple(x.shape) for x in tensors_in(out)]) if self.data_dependent else out

    def compute(self, tensors: list, args: tuple, kwargs: dict) -> Any:
        shards = [plain(t) for t in tensors]
        assert self.choice is not None and self.choice.form is not None
        args, kwargs = with_tensors(args, kwargs, shards)
        local = Shards(
            run=self.function,  # type: ignore[arg-type]
            call=self.call,
            axes=self.choice.form_axes,
            tensors=tuple(shards),
            specs=self.operands,
            outs=self.outs,  # type: ignore[arg-type]
            args=args,
            kwargs=kwargs,
        )
        return FORMS[self.choice.form](local)

    def _attach_specs(
        self, out: Any, specs: Sequence[TensorSpec], first: Any
    ) -> tuple[Any, Sequence[TensorSpec]]:
        if self.inplace or not self.data_dependent:
            return super()._attach_specs(out, specs, first)
        out, shapes = out
        outs = tuple(
            TensorSpec.of(self.placement, o.sbp, shape, o.dtype)  # type: ignore[union-attr]
            for o, shape in zip(self.outs, shapes, strict=True)
        )
        return retype(out, outs), outs


class InPlaceOnCopy(OnShards):
    """Plan of an in-place op that cannot run on the layout of its target.

    The target is boxed to B, the op runs on this copy, and the result is boxed back into the
    target.
    """

    kind = "whole"

    @property
    def is_one_call(self) -> bool:
        return False

    def run(self, args: tuple, kwargs: dict, tensors: list) -> Any:
        for notify in _ON_OP_BEGIN:
            notify(self)
        if self._writes_into_plain():
            return write_into_plain(self.function, args, kwargs, tensors)
        for index in self.adopted:
            convert = promote if index == 0 else adopt
            tensors[index] = convert(tensors[index], self.placement, self.name)
        target, operands = tensors[0], list(tensors)
        if target._moved_view:
            return moved_views.write_through(self, args, kwargs, target)
        spec, whole = target._spec, Layout.whole(self.placement)
        specs = [t._spec for t in operands]
        copies = [rebox(t, t._spec.with_layout(whole), self.name) for t in operands]
        copies[0] = attach(plain(copies[0]).clone(), spec.with_layout(whole))
        out = self._run_wrapped(copies, args, kwargs)
        result = plain(copies[0])
        if tuple(result.shape) != tuple(spec.shape):
            raise RuntimeError(
                f"{self.name}: the result has shape {tuple(result.shape)}, and the tensor it is "
                f"written into is {spec}. Call the op that returns a new tensor."
            )
        new_shard = box(result, spec.with_layout(whole), spec)
        with HookOff():
            _Tensor.copy_(target, new_shard)
        if moved_views.alive:
            count_write(target)
        for index in self.writes:
            if index != 0:
                self._box_back(copies[index], operands[index])
        for notify in _ON_OP_END:
            notify(self, operands, target, specs, (spec,))
        return target if out is not None else None


def _any_floats(tensors: Sequence[torch.Tensor]) -> bool:
    return any(t.dtype.is_floating_point for t in tensors)


def _attach_by_layout(
    out: Any, outs: Sequence[Any], operands: Sequence[TensorSpec]
) -> tuple[Any, list[TensorSpec]]:
    """Turn the plain results of a plan that serves all sizes into global tensors.

    ``outs`` are their layouts. The logical length of a dim is that of the shard, or of a dim of one
    of ``operands`` if the dim is split.
    """

    def spec_of(position: int, x: torch.Tensor) -> TensorSpec:
        rule: OutLayout = outs[min(position, len(outs) - 1)]
        local = plain(x).shape if is_global(x) else x.shape
        return TensorSpec.laid(rule.layout, _logical_shape(local, rule.sources, operands), x.dtype)

    return attach_each(out, spec_of)


def _logical_shape(
    local: torch.Size, sources: Sequence[LengthSource], operands: Sequence[TensorSpec]
) -> torch.Size:
    """Return the logical shape of an output whose shard has the shape ``local``.

    ``sources`` say which dims of ``operands`` the split dims of the output have their lengths from.
    """
    if not sources:
        return local
    shape = list(local)
    for source in sources:
        shape[source.dim] = operands[source.operand].shape[source.along]
    return torch.Size(shape)
