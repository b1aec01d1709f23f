"""explain(): the layouts an op could run under, the cost of each, and the choice that is made.

The call is planned as a rank outside every placement would plan it: on ``meta`` stand-ins and
without communication. Arguments, cached plans and the random state stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrored.comm import Transport
from mirrored.transports.default import current

from ..boxing.plan import boxing_bytes, plan_bytes
from ..boxing.plan import plan as plan_boxing
from ..dispatch.plans.arguments import collect, with_tensors
from ..dispatch.plans.plan import OtherCall, Plan
from ..dispatch.plans.shards import attach, is_global
from ..dispatch.running.on_lists import OnLists
from ..dispatch.running.on_shards import OnShards
from ..graph.stand_ins import outside_all_placements
from ..movement.between_hosts import bytes_between
from ..rules import table
from ..rules.candidates import candidates
from ..rules.choose import estimated_seconds, pieces_by_other_axes
from ..rules.signature import Signature
from ..spec import TensorSpec
from .followed import FollowedBoxing, FollowedCall
from .replaced_state import replaced_state

_REASON = "explain sends nothing, and here a value is needed"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One signature (layouts of operands and results) along one placement axis, and its cost.

    Args:
        boxes: the operands whose layout would change, such as ``0: S(0)->B``.
        nbytes: bytes that the busiest rank sends, to box the operands and in the op itself.
        seconds: estimated time, by which signatures are compared; for a P result, it includes the
            later reduction.
        chosen: whether the op runs under this signature.
    """

    signature: Signature
    boxes: tuple[str, ...]
    nbytes: int  # sent by the busiest rank, to box the operands and in the op itself
    seconds: float  # what the choice compares; a P result includes its later reduction
    chosen: bool


@dataclass(frozen=True, slots=True)
class Explained:
    """How one op of a call runs, and the signatures that it chose from on each placement axis.

    Args:
        name: the op, or what a boxing between ops is for.
        how: how it runs, in words.
        operands: specs of its operands.
        result: layouts of its results.
        nbytes: bytes that the busiest rank sends.
        axes: for each placement axis, the candidates; empty if the op runs on gathered inputs.
    """

    name: str
    how: str
    operands: tuple[TensorSpec, ...]
    result: str
    nbytes: int
    axes: tuple[tuple[Candidate, ...], ...] = ()
    between: int | None = 0
    """Bytes that all ranks together send from host to host to box the operands. None if the number
    is not known: before ranks have communicated, and on GPUs."""

    def __str__(self) -> str:
        operands = ", ".join(map(repr, self.operands))
        sent = f"; {self.nbytes:,} bytes" if self.operands else ""
        sent += f", {self.between:,} of all ranks from host to host" if self.between else ""
        lines = [f"{self.name}: {self.how}{sent}"]
        lines += [f"  given {operands}"] if operands else []
        for axis, options in enumerate(self.axes):
            lines += [f"  axis {axis}", *("    " + row for row in _table(options))]
        return "\n".join(lines)


class Explanation:
    """The ops that a call runs, in order; printing shows a table for each.

    ``stopped`` is why planning ended before the end of the call, such as a value that it reads.
    """

    def __init__(self, ops: Sequence[Explained], stopped: str = "") -> None:
        self.ops = tuple(ops)
        self.stopped = stopped

    @property
    def nbytes(self) -> int:
        """The bytes that the busiest rank sends in all ops."""
        return sum(op.nbytes for op in self.ops)

    def __getitem__(self, name: str) -> Explained:
        """Return the first op called ``name``."""
        return next(op for op in self.ops if op.name == name)

    def __repr__(self) -> str:
        stopped = [f"planned no further: {self.stopped}"] if self.stopped else []
        return "\n".join([*map(str, self.ops), *stopped])


def explain(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explain why ``func(*args, **kwargs)`` on global tensors runs under the layout it does.

    ``print(consistent.explain(torch.matmul, x, w))`` shows for each placement axis the signatures
    (layouts of operands and results) that the op accepts, what each redistributes (boxes) and
    sends, the estimated time, and the choice. For a composition such as ``F.cross_entropy``, it
    shows the ops inside; ``func`` may also be a user's function. Nothing is computed or sent, so a
    single rank may call it. A function that reads values, or computes shapes from values, is
    planned up to that point.

    ``func`` may be a training step: parameters, gradients and the state of optimizers that it
    reaches are replaced by tensors without values meanwhile. Boxings between ops follow in their
    order, those of backward and the sums of gradients over ranks among them. The ops that torch
    runs in backward are not shown: they run on the shards of the forward op. What ``func`` changes
    other than tensors, such as a learning rate, stays changed.

    Raises:
        TypeError: no argument is a global tensor.
    """
    if not callable(func):
        raise TypeError(
            f"explain: func is {func!r}, and not a function. Write explain(torch.matmul, x, w)."
        )
    tensors: list[Any] = []
    collect((args, kwargs), tensors)
    if not any(map(is_global, tensors)):
        raise TypeError(
            f"explain: no argument of {getattr(func, '__name__', func)} is a global tensor.\n"
            "  Plain tensors run as torch runs them, and there is nothing to choose.\n"
            "  Give it global tensors: consistent.distribute(x, placement, sbp)."
        )
    stopped, transport = "", current()
    with (
        outside_all_placements(_REASON, 1, plan_each=True),
        replaced_state(func, (args, kwargs)) as leaves,
    ):
        followed = FollowedCall(leaves)
        stand_ins = [_stand_in(x) for x in tensors]
        args, kwargs = with_tensors(args, kwargs, stand_ins)
        try:
            with followed.tracer.tracing():
                func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the call needs a value, or torch refuses it
            stopped = f"{type(error).__name__}: {error}"
            # With no op met, there is nothing to explain, and the error is the caller's.
            if not followed.events:
                raise
        ops = [
            _explain_boxing(item, transport)
            if isinstance(item, FollowedBoxing)
            else _explain_plan(item, transport)
            for item in followed.events
        ]
    return Explanation([op for op in ops if op is not None], stopped)


def _explain_boxing(boxing: FollowedBoxing, transport: Transport) -> Explained:
    name, src, dst, moves = boxing
    result = str(dst.sbp[0] if len(dst.sbp) == 1 else dst.sbp)
    between = bytes_between(src, moves, transport=transport)
    how = f"sends {', '.join(map(str, moves))}"
    return Explained(name, how, (src,), result, plan_bytes(moves), between=between)


def _stand_in(x: torch.Tensor) -> Any:
    # clone() makes a stand-in that requires grad a non-leaf, so that in-place ops may write to it.
    if not is_global(x):
        return x.detach().requires_grad_(x.requires_grad).clone()
    spec: TensorSpec = x._spec  # type: ignore[attr-defined]
    shape, tracked = spec.local_shape(None), x.requires_grad
    empty = torch.empty(shape, dtype=spec.dtype, device="meta", requires_grad=tracked)
    return attach(empty.clone(), spec)


def _explain_plan(plan: Plan, transport: Transport) -> Explained | None:
    if isinstance(plan, OnLists):
        return Explained(plan.name, "runs on lists of shards", (), "", 0)
    if isinstance(plan, OtherCall) and plan.opens:
        return Explained(plan.name, "opened, the ops inside it follow", (), "", 0)
    if not isinstance(plan, OnShards):
        return None
    operands = tuple(operand.spec for operand in plan.call.operands)
    nbytes, routes = 0, list[tuple[TensorSpec, TensorSpec]]()
    for i, layout in plan.boxes:
        boxed = operands[i].with_layout(layout)
        nbytes += boxing_bytes(operands[i], boxed)
        # An operand that the op writes to is boxed back afterwards.
        nbytes += boxing_bytes(boxed, operands[i]) if i in plan.writes else 0
        routes += [(operands[i], boxed)] + ([(boxed, operands[i])] if i in plan.writes else [])
    between_nbytes = [bytes_between(a, plan_boxing(a, b), transport=transport) for a, b in routes]
    between = None if None in between_nbytes else sum(filter(None, between_nbytes))
    if plan.choice is None:
        return Explained(plan.name, why_whole(plan), operands, "B", nbytes, between=between)
    row = table.find_row(plan.name)
    assert row is not None
    axes = candidates(row, plan.call, plan.placement)
    assert axes is not None
    by_axis = tuple(
        _candidates_on_axis(plan, operands, options, axis) for axis, options in enumerate(axes)
    )
    nbytes += sum(_chosen_candidate(options).signature.nbytes for options in by_axis)
    result = ", ".join(str(s[0] if len(s) == 1 else s) for s in plan.choice.outs)
    how = f"runs by {plan.choice.form}" if plan.choice.form else "runs on the shards"
    return Explained(plan.name, f"{how} -> {result}", operands, result, nbytes, by_axis, between)


def why_whole(plan: OnShards) -> str:
    """Return the text ``runs whole ...``: why every rank runs the op on gathered inputs.

    Such an op is called whole: no rule for shards fits it.
    """
    if table.find_row(plan.name) is None:
        return "runs whole on every rank, for it has no row"
    if plan.inplace:
        return "runs whole and is boxed back, for no signature keeps the layout of its target"
    return "runs whole on every rank, for its row does not fit this call"


def _chosen_candidate(options: Sequence[Candidate]) -> Candidate:
    return next(option for option in options if option.chosen)


def _candidates_on_axis(
    plan: OnShards, operands: Sequence[TensorSpec], options: Sequence[Signature], axis: int
) -> tuple[Candidate, ...]:
    """Return the candidates on one placement axis: the chosen one first, then the cheapest.

    Args:
        plan: how the op runs.
        operands: specs of its operands.
        options: the signatures that the op accepts on the axis.
    """
    choice = plan.choice
    assert choice is not None
    ins, outs = ([sbp[axis] for sbp in side] for side in (choice.ins, choice.outs))
    form = choice.form if axis in choice.form_axes else None
    found_candidates: list[Candidate] = []
    cuts = [pieces_by_other_axes(operands[0].placement, sbp, axis) for sbp in choice.outs]
    # In place, the target keeps its SBP.
    target_sbp = operands[0].sbp[axis] if plan.inplace else None
    for option in dict.fromkeys(options):
        if target_sbp is not None and (
            option.ins[0] is not target_sbp or option.outs[0] is not target_sbp
        ):
            continue
        boxes, nbytes = [], option.nbytes
        for index, (spec, want) in enumerate(zip(operands, option.ins, strict=True)):
            if want is not spec.sbp[axis]:
                target = spec.with_sbp((*spec.sbp[:axis], want, *spec.sbp[axis + 1 :]))
                boxes.append(f"{index}: {spec.sbp[axis]}->{want}")
                nbytes += boxing_bytes(spec, target)
        cost = estimated_seconds(plan.call, operands, option, axis, cuts)
        is_chosen = [*option.ins] == ins and [*option.outs] == outs and option.form == form
        # Several signatures may match the choice on this axis; only the first is marked.
        is_chosen = is_chosen and not any(candidate.chosen for candidate in found_candidates)
        found_candidates.append(Candidate(option, tuple(boxes), nbytes, cost, is_chosen))
    return tuple(sorted(found_candidates, key=lambda c: (not c.chosen, c.seconds)))


def _table(options: Sequence[Candidate]) -> list[str]:
    rows = [("", "signature", "boxes", "bytes", "time")]
    for c in options:
        mark = "->" if c.chosen else ""
        boxes = ", ".join(c.boxes) or "nothing"
        rows.append((mark, repr(c.signature), boxes, f"{c.nbytes:,}", f"{c.seconds * 1e6:,.1f} us"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        "  ".join(
            cell.rjust(width) if i > 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
