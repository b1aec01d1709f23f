"""Advice: which other layout of an operand would spare a boxing, found among the op's candidates.

A change is named only if the choice that the library makes (``rules/choose.py``) is then to move
nothing, and if summing a result that becomes partial by it sends less than is moved now. What the
change costs where that operand is made, and where else it is used, is not known here.
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
from ..spec import B, NdSbp, TensorSpec, is_one_way
from ..spec.bytes_text import bytes_text
from .explain import why_whole

MOST_OPTIONS = 512  # combinations of signatures over the axes, that are tried
MOST_CHANGES = 3  # operands that would lie otherwise
MOST_WAYS = 2  # that are named
_VERBS = {
    "all_gather": "gathers",
    "all_reduce": "sums",
    "reduce_scatter": "sums and scatters",
    "all_to_all": "exchanges pieces of",
    "exchange": "exchanges pieces of",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """What an op moves each time it runs, and what would spare it.

    Args:
        op, site: which line of the report it is about.
        nbytes: that the busiest rank sends in one call.
        moves: what is moved, in words.
        instead: what to change; "" where nothing is known.
    """

    op: str
    site: str
    nbytes: int
    moves: str
    instead: str

    def __str__(self) -> str:
        return f"`{self.op}` at {short_site(self.site)} {self.moves}. {self.instead}".rstrip()


def advise(made: Plan, specs: Sequence[TensorSpec], site: str) -> Advice | None:
    """Advice on a plan that has run on operands of ``specs``; None if it moved nothing, or no
    better layout of one operand is known."""
    if not isinstance(made, OnShards) or not made.boxes:
        return None
    operands = tuple(operand.spec for operand in made.call.operands)
    if operands != tuple(specs):  # a plan for all sizes; those of this call are not the plan's
        return None
    names = _names(made.call)
    sent = {i: boxing_bytes(operands[i], operands[i].with_layout(to)) for i, to in made.boxes}
    nbytes = sum(sent.values())
    if not nbytes:
        return None
    moves = " and ".join(
        _moved(names[i], operands[i], operands[i].with_layout(to))
        for i, to in made.boxes
        if sent[i]
    )
    moves += f": {bytes_text(nbytes)} a call"
    if made.choice is None:
        return Advice(made.name, site, nbytes, moves, f"It {why_whole(made)}.")
    ways = sorted(_ways(made, made.choice, operands, nbytes), key=lambda way: way.rank)
    best: list[_Way] = []
    for way in ways:  # one that changes more than a better one does is not worth telling
        if len(best) < MOST_WAYS and not any(each.operands <= way.operands for each in best):
            best.append(way)
    if not best:
        return None
    text = "I" + _sentence(best[0], operands, names)[1:]
    text += "".join(f" Or {_sentence(way, operands, names)}" for way in best[1:])
    return Advice(made.name, site, nbytes, moves, text)


@dataclass(frozen=True, slots=True)
class _Way:
    """Layouts of some operands in which the op moves nothing."""

    changes: tuple[tuple[int, TensorSpec], ...]  # operand, its spec then
    result: str  # how the results would lie; "" as now
    later: int  # bytes that summing the results sends, if they are partial then and are not now
    held: int  # bytes of the changed operands that a rank would hold

    @property
    def operands(self) -> set[int]:
        """Those that change."""
        return {index for index, _ in self.changes}

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """The best way has the least."""
        return self.later, len(self.changes), bool(self.result), self.held


def _ways(
    made: OnShards, choice: Choice, operands: Sequence[TensorSpec], nbytes: int
) -> Iterator[_Way]:
    """Each way that sends less than ``nbytes``, by the signatures of the op."""
    row = table.find(made.name)
    by_axis = candidates(row, made.call, made.placement) if row is not None else None
    if row is None or by_axis is None:
        return
    unlike: set[tuple[NdSbp, ...]] = set()
    for option in itertools.islice(itertools.product(*by_axis), MOST_OPTIONS):
        ins = tuple(tuple(s.ins[i] for s in option) for i in range(len(operands)))
        then = [spec.with_sbp(sbp) if is_one_way(sbp) else None for spec, sbp in zip(operands, ins)]
        if ins in unlike or None in then:
            continue
        unlike.add(ins)
        specs = [spec for spec in then if spec is not None]
        changes = [(i, a, b) for i, (a, b) in enumerate(zip(operands, specs)) if a is not b]
        if len(changes) > MOST_CHANGES or not all(_may_change(made, *each) for each in changes):
            continue
        found = _chosen(row, made, specs)
        if found is None:
            continue
        later = _later(made, found, choice)
        if later < nbytes:
            new = "" if found.outs == choice.outs else ", ".join(map(_text, found.outs))
            held = sum(_held(b) for _, _, b in changes)
            yield _Way(tuple((i, b) for i, _, b in changes), new, later, held)


def _may_change(made: OnShards, index: int, now: TensorSpec, then: TensorSpec) -> bool:
    """Whether it would help to have an operand come in another layout: the target of an op in place
    keeps its own, and addends have to be summed somewhere."""
    if made.inplace and index == 0:
        return False
    pairs = zip(now.sbp, then.sbp, strict=True)
    return not any((a.is_partial or b.is_partial) and a is not b for a, b in pairs)


def _later(made: OnShards, found: Choice, choice: Choice) -> int:
    """Bytes that the busiest rank sends to sum results that are partial only in ``found``."""
    total = 0
    for out, then, now in zip(made.call.outs, found.outs, choice.outs, strict=True):
        summed = tuple(
            B if b.is_partial and not a.is_partial else b for a, b in zip(now, then, strict=True)
        )
        spec = TensorSpec.of(made.placement, then, out.shape, out.dtype)
        total += boxing_bytes(spec, spec.with_sbp(summed))
    return total


def _chosen(row: table.Row, made: OnShards, specs: Sequence[TensorSpec]) -> Choice | None:
    """How the op would run on ``specs``, if nothing were moved then."""
    old = made.call
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
    by_axis = candidates(row, call, made.placement)
    pin = specs[0].sbp if made.inplace else None
    found = None if by_axis is None else choose(call, specs, by_axis, pin)
    if found is None or by_axis is None or found.ins != tuple(spec.sbp for spec in specs):
        return None
    for axis, options in enumerate(by_axis):
        form = found.form if axis in found.form_axes else None
        ins, outs = ([sbp[axis] for sbp in side] for side in (found.ins, found.outs))
        same = [o for o in options if [*o.ins] == ins and [*o.outs] == outs and o.form == form]
        if any(option.nbytes for option in same):
            return None
    return found


def _names(call: Call) -> list[str]:
    """What torch calls each operand; of those it has no name for, their number."""
    names = [f"operand {i}" for i in range(len(call.operands))]
    given = [*zip(call.params, call.args), *call.kwargs.items()]
    for name, value in given:
        if isinstance(value, Operand):
            names[value.index] = f"`{name}`"
    return names


def _moved(name: str, src: TensorSpec, dst: TensorSpec) -> str:
    kinds = dict.fromkeys(_VERBS.get(move.kind, "") for move in plan(src, dst))
    verbs = " and ".join(filter(None, kinds)) or "moves"
    return f"{verbs} {name}, {_short(src)}, to {_text(dst.sbp)}"


def _sentence(way: _Way, operands: Sequence[TensorSpec], names: list[str]) -> str:
    parts = []
    for index, then in way.changes:
        more = _held(then) - _held(operands[index])
        memory = f" ({bytes_text(more)} more on each rank)" if more > 0 else ""
        parts.append(f"{names[index]} came as {_text(then.sbp)}{memory}")
    text = f"if {' and '.join(parts)}, nothing would move here"
    if way.later:
        text += (
            f"; the result would be {way.result}, whose sum sends {bytes_text(way.later)} at most"
        )
    elif way.result:
        text += f"; the result would be {way.result}"
    else:
        text += ", and the result would lie as it does now"
    return f"{text}."


def _held(spec: TensorSpec) -> int:
    count = spec.dtype.itemsize
    for size in spec.local_shape(None):
        count *= size
    return count


def _short(spec: TensorSpec) -> str:
    return repr(spec).partition(" on ")[0]


def _text(sbp: NdSbp) -> str:
    return str(sbp[0]) if len(sbp) == 1 else str(sbp)
