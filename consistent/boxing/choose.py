"""Which of an op's signatures to box its inputs into. Arithmetic only; every rank gets the same
answer.

One axis at a time. A signature that fits the inputs as they lie costs nothing and wins (data stays
where it is). Otherwise the cheapest in seconds: bytes to box now, bytes that the local form sends,
and the bytes that the op then touches on each rank (so that, at equal boxing, a split beats
computing the same on every rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..rules.signature import Call, Signature
from ..spec import NdSbp, Sbp, Split, TensorSpec, is_one_way
from .cost import latency_seconds, touch_seconds, wire_seconds
from .plan import boxing_seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen nd-sbp of every operand and output; the local form and the axes it serves."""

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]
    form: str | None
    form_axes: tuple[int, ...]
    boxed: bool

    def __repr__(self) -> str:
        return f"{self.ins} -> {self.outs}" + (f" by {self.form}" if self.form else "")


def choose(
    call: Call,
    specs: Sequence[TensorSpec],
    by_axis: Sequence[Sequence[Signature]],
    pin: NdSbp | None,
) -> Choice | None:
    """The cheapest signature on each axis.

    Args:
        call: the op, for sizes of its outputs.
        specs: the operands as they lie.
        by_axis: for each placement axis the signatures to choose from.
        pin: for an in-place op, the nd-sbp that its first operand and first output must keep.

    Returns None if a pinned operand fits no signature.
    """
    picked: list[Signature] = []
    form: str | None = None
    for axis, options in enumerate(by_axis):
        allowed = [s for s in options if s.form is None or form is None or s.form == form]
        if pin is not None:
            allowed = [s for s in allowed if s.ins[0] is pin[axis] and s.outs[0] is pin[axis]]
        allowed = [s for s in allowed if _is_one_way([*picked, s])]
        if not allowed:
            return None
        best = _cheapest(call, specs, allowed, axis)
        form = form or best.form
        picked.append(best)
    count, outs = len(specs), len(call.outs)
    ins = tuple(tuple(s.ins[i] for s in picked) for i in range(count))
    return Choice(
        ins,
        tuple(tuple(s.outs[i] for s in picked) for i in range(outs)),
        form,
        tuple(a for a, s in enumerate(picked) if s.form is not None),
        any(ins[i] != specs[i].sbp for i in range(count)),
    )


def _is_one_way(picked: Sequence[Signature]) -> bool:
    """Whether no operand and no output is partial in two ways over the axes."""
    sides = ([s.ins for s in picked], [s.outs for s in picked])
    return all(is_one_way(entries) for side in sides for entries in zip(*side, strict=True))


def _cheapest(
    call: Call, specs: Sequence[TensorSpec], options: Sequence[Signature], axis: int
) -> Signature:
    have = tuple(spec.sbp[axis] for spec in specs)
    for option in options:
        if option.ins == have and option.nbytes == 0:
            return option
    # At equal cost the first operands stay where they are: views are taken of the first one.
    costs = [
        (
            seconds(call, specs, option, axis),
            [w is not h for w, h in zip(option.ins, have, strict=True)],
            i,
        )
        for i, option in enumerate(options)
    ]
    return options[min(costs)[2]]


def seconds(call: Call, specs: Sequence[TensorSpec], option: Signature, axis: int) -> float:
    """Estimated seconds of laying the operands out as ``option`` says on ``axis`` and running
    the op."""
    total = 0.0
    parts = specs[0].placement.shape[axis] if specs else 1
    kind = specs[0].placement.type if specs else "cpu"
    for spec, want in zip(specs, option.ins, strict=True):
        if want is not spec.sbp[axis]:
            target = spec.with_sbp(spec.sbp[:axis] + (want,) + spec.sbp[axis + 1 :])
            total += boxing_seconds(spec, target)
        total += touch_seconds(_held(spec.nbytes, want, parts), kind)
    for out, have in zip(call.outs, option.outs, strict=True):
        nbytes = out.shape.numel() * out.dtype.itemsize
        total += touch_seconds(_held(nbytes, have, parts), kind)
        if have.is_partial:
            # A partial result is a debt: whoever reads it pays at least a reduce-scatter.
            total += latency_seconds(kind) + wire_seconds(nbytes * (parts - 1) // parts, kind)
    if option.form is not None:
        total += wire_seconds(option.nbytes, kind) + (
            latency_seconds(kind) if option.nbytes else 0.0
        )
    return total


def _held(nbytes: int, entry: Sbp, parts: int) -> float:
    return nbytes / parts if isinstance(entry, Split) else nbytes
