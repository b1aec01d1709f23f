"""Advise which other layout of an operand would avoid a redistribution (boxing) before an op.

It is found among the op's signatures, the layouts that the op accepts.

A change is suggested only if the library's choice (``rules/choose.py``) would then move nothing,
and if all-reducing a result that becomes partial through the change sends fewer bytes than are
moved now. The cost of the change where the operand is made, and where else it is used, is not known
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..boxing.plan import boxing_bytes, plan
from ..dispatch.plans.arguments import fill
from ..dispatch.plans.plan import Plan
from ..dispatch.running.on_shards import OnShards
from ..drawing.words import short_site
from ..rules import table
from ..rules.candidates import candidates
from ..rules.choose import Choice, choose
from ..rules.signature import Call, Operand
from ..spec import B, NdSbp, TensorSpec, has_one_partial_kind, sbp_text
from ..spec.bytes_text import bytes_text
from .explain import why_whole

MAX_OPTIONS = 512  # combinations of signatures over the axes that are tried
MAX_CHANGES = 3  # operands whose layout may change at once
MAX_WAYS = 2  # alternatives that one advice names
_VERBS = {
    "all_gather": "gathers",
    "all_reduce": "sums",
    "reduce_scatter": "sums and scatters",
    "all_to_all": "exchanges pieces of",
    "exchange": "exchanges pieces of",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """The boxing (change of layout) of an op's operands, and a change that would avoid it.

    Args:
        op, site: the op, and the ``file:line`` of its call.
        nbytes: bytes that the busiest rank sends in one call.
        moves: what is moved, in words.
        instead: what to change; "" if no change is known.
    """

    op: str
    site: str
    nbytes: int
    moves: str
    instead: str

    def __str__(self) -> str:
        return f"`{self.op}` at {short_site(self.site)} {self.moves}. {self.instead}".rstrip()


def advise(plan: Plan, specs: Sequence[TensorSpec], site: str) -> Advice | None:
    """Return advice on a call's boxing, for the report; None if there is nothing to advise.

    There is none if the plan moved nothing, or if no better layout of the operands is known.

    Args:
        plan: the plan that has run, that is, what the library decided for the call.
        specs: the specs of the call's operands.
        site: the ``file:line`` of the call.
    """
    if not isinstance(plan, OnShards) or not plan.boxes:
        return None
    operands = tuple(operand.spec for operand in plan.call.operands)
    # A plan may be shared by calls of many sizes; its own byte counts would then be wrong for this
    # call.
    if operands != tuple(specs):
        return None
    names = _names(plan.call)
    sent = {i: boxing_bytes(operands[i], operands[i].with_layout(to)) for i, to in plan.boxes}
    nbytes = sum(sent.values())
    if not nbytes:
        return None
    moves = " and ".join(
        _move_text(names[i], operands[i], operands[i].with_layout(to))
        for i, to in plan.boxes
        if sent[i]
    )
    moves += f": {bytes_text(nbytes)} a call"
    if plan.choice is None:
        return Advice(plan.name, site, nbytes, moves, f"It {why_whole(plan)}.")
    ways = sorted(_ways(plan, plan.choice, operands, nbytes), key=lambda way: way.rank)
    best: list[_Way] = []
    for way in ways:  # skip a way that changes the operands of a better way and more
        if len(best) < MAX_WAYS and not any(better.operands <= way.operands for better in best):
            best.append(way)
    if not best:
        return None
    text = "I" + _sentence(best[0], operands, names)[1:]
    text += "".join(f" Or {_sentence(way, operands, names)}" for way in best[1:])
    return Advice(plan.name, site, nbytes, moves, text)


@dataclass(frozen=True, slots=True)
class _Way:
    """New layouts of some operands with which an op would box nothing.

    Args:
        changes: (index of an operand, its new spec).
        result: layouts of the results as text; "" if they stay the same.
        later_nbytes: bytes sent to reduce results that become partial through the change.
        held_nbytes: bytes of the changed operands that a rank would hold.
    """

    changes: tuple[tuple[int, TensorSpec], ...]  # (operand, its new spec)
    result: str  # layouts of the results; "" if they stay the same
    later_nbytes: int  # bytes sent to reduce results that become partial through the change
    held_nbytes: int  # bytes of the changed operands that a rank would hold

    @property
    def operands(self) -> set[int]:
        """The indices of the operands that change."""
        return {index for index, _ in self.changes}

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Sort key of this way; the best way has the smallest key."""
        return self.later_nbytes, len(self.changes), bool(self.result), self.held_nbytes


def _ways(
    op_plan: OnShards, choice: Choice, operands: Sequence[TensorSpec], nbytes: int
) -> Iterator[_Way]:
    """Yield the new layouts of operands that would send less than the present ``nbytes``.

    They are found among the op's signatures (layouts of operands and results that it accepts).

    Args:
        op_plan: the plan of the call.
        choice: the layouts that it chose.
        operands: specs of its operands.
    """
    row = table.find_row(op_plan.name)
    by_axis = candidates(row, op_plan.call, op_plan.placement) if row is not None else None
    if row is None or by_axis is None:
        return
    tried: set[tuple[NdSbp, ...]] = set()
    for option in itertools.islice(itertools.product(*by_axis), MAX_OPTIONS):
        ins = tuple(tuple(s.ins[i] for s in option) for i in range(len(operands)))
        new_specs = [
            spec.with_sbp(sbp) if has_one_partial_kind(sbp) else None
            for spec, sbp in zip(operands, ins)
        ]
        if ins in tried or None in new_specs:
            continue
        tried.add(ins)
        specs = [spec for spec in new_specs if spec is not None]
        # Specs are interned, so equal specs are the same object.
        changes = [(i, a, b) for i, (a, b) in enumerate(zip(operands, specs)) if a is not b]
        if len(changes) > MAX_CHANGES or not all(_may_change(op_plan, *each) for each in changes):
            continue
        variant = _choose_for(row, op_plan, specs)
        if variant is None:
            continue
        later_nbytes = _later_bytes(op_plan, variant, choice)
        if later_nbytes < nbytes:
            result = "" if variant.outs == choice.outs else ", ".join(map(sbp_text, variant.outs))
            held_nbytes = sum(_local_nbytes(b) for _, _, b in changes)
            yield _Way(tuple((i, b) for i, _, b in changes), result, later_nbytes, held_nbytes)


def _may_change(op_plan: OnShards, index: int, present: TensorSpec, proposed: TensorSpec) -> bool:
    """Return whether advice may suggest the spec ``proposed`` for an operand that has ``present``.

    The target of an in-place op must keep its layout. Partial sums must stay, too, since they have
    to be reduced somewhere in any case.
    """
    if op_plan.inplace and index == 0:
        return False
    pairs = zip(present.sbp, proposed.sbp, strict=True)
    return not any((a.is_partial or b.is_partial) and a is not b for a, b in pairs)


def _later_bytes(op_plan: OnShards, new_choice: Choice, choice: Choice) -> int:
    """Return the bytes sent to reduce results that a change of layouts makes partial.

    ``choice`` is what the op chose, ``new_choice`` what it would choose after the change. The bytes
    are those of the busiest rank.
    """
    total = 0
    for out, new_sbp, old_sbp in zip(op_plan.call.outs, new_choice.outs, choice.outs, strict=True):
        reduced = tuple(
            B if b.is_partial and not a.is_partial else b
            for a, b in zip(old_sbp, new_sbp, strict=True)
        )
        spec = TensorSpec.of(op_plan.placement, new_sbp, out.shape, out.dtype)
        total += boxing_bytes(spec, spec.with_sbp(reduced))
    return total


def _choose_for(row: table.Row, op_plan: OnShards, specs: Sequence[TensorSpec]) -> Choice | None:
    """Return the layouts that the op of ``op_plan`` would choose for operands of ``specs``.

    Return None if it would then box an operand. ``row`` has the rule of the op.
    """
    old = op_plan.call
    operands = tuple(Operand(o.index, spec) for o, spec in zip(old.operands, specs, strict=True))
    args, kwargs = fill(tuple(old.args), operands), fill(dict(old.kwargs), operands)
    call = Call(
        old.name,
        args,
        kwargs,
        operands,
        old.outs,
        old.params,
        old.defaults,
        old.inplace,
        old.tracked,
    )
    call.subscript = old.subscript
    by_axis = candidates(row, call, op_plan.placement)
    pin = specs[0].sbp if op_plan.inplace else None
    new_choice = None if by_axis is None else choose(call, specs, by_axis, pin)
    if new_choice is None or by_axis is None or new_choice.ins != tuple(spec.sbp for spec in specs):
        return None
    for axis, options in enumerate(by_axis):
        form = new_choice.form if axis in new_choice.form_axes else None
        ins, outs = ([sbp[axis] for sbp in side] for side in (new_choice.ins, new_choice.outs))
        matching = [o for o in options if [*o.ins] == ins and [*o.outs] == outs and o.form == form]
        if any(option.nbytes for option in matching):
            return None
    return new_choice


def _names(call: Call) -> list[str]:
    """Return the parameter name of each operand in backquotes, or ``operand 0`` without a name."""
    names = [f"operand {i}" for i in range(len(call.operands))]
    arguments = [*zip(call.params, call.args), *call.kwargs.items()]
    for name, value in arguments:
        if isinstance(value, Operand):
            names[value.index] = f"`{name}`"
    return names


def _move_text(name: str, src: TensorSpec, dst: TensorSpec) -> str:
    kinds = dict.fromkeys(_VERBS.get(move.kind, "") for move in plan(src, dst))
    verbs = " and ".join(filter(None, kinds)) or "moves"
    return f"{verbs} {name}, {_short_spec(src)}, to {sbp_text(dst.sbp)}"


def _sentence(way: _Way, operands: Sequence[TensorSpec], names: list[str]) -> str:
    parts = []
    for index, new_spec in way.changes:
        extra_nbytes = _local_nbytes(new_spec) - _local_nbytes(operands[index])
        memory = f" ({bytes_text(extra_nbytes)} more on each rank)" if extra_nbytes > 0 else ""
        parts.append(f"{names[index]} came as {sbp_text(new_spec.sbp)}{memory}")
    text = f"if {' and '.join(parts)}, nothing would move here"
    if way.later_nbytes:
        text += (
            f"; the result would be {way.result}, whose sum sends "
            f"{bytes_text(way.later_nbytes)} at most"
        )
    elif way.result:
        text += f"; the result would be {way.result}"
    else:
        text += ", and the result would lie as it does now"
    return f"{text}."


def _local_nbytes(spec: TensorSpec) -> int:
    count = spec.dtype.itemsize
    for size in spec.local_shape(None):
        count *= size
    return count


def _short_spec(spec: TensorSpec) -> str:
    return repr(spec).partition(" on ")[0]
