"""Choice of one signature per placement axis for a call, to which its inputs are then boxed.

It is arithmetic on specs alone, so every rank gets the same answer. Axes are decided one at a time.
A signature that fits the inputs without boxing costs nothing and wins (data stays where it is),
unless it makes a P though no input is P: that P has to be reduced later. Otherwise the
signature with the lowest estimated time wins. The time is the sum of

* the bytes to box now,
* the bytes that a form (local code that runs in place of the op) sends,
* the messages that later use of the output will need: a P must be reduced, and a split that no
  operand had may have to be gathered,
* the bytes that the op then touches on each rank, so that, at equal boxing, a split beats computing
  the same on every rank.

So a large P is reduce-scattered, and a small one, for which only the number of messages counts, is
all-reduced once and for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..boxing.plan import boxing_seconds
from ..cost_model.built_in import BUILT_IN
from ..spec import (
    NdSbp,
    Placement,
    Sbp,
    Split,
    TensorSpec,
    has_one_partial_kind,
    invalid_cut_reason,
)
from .signature import Call, Out, Signature


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen nd-sbp (one SBP per axis) of every operand and output of a call.

    Operands are boxed to ``ins`` before the op runs. ``form`` names the local code that runs in
    place of the op, or is None if the op itself runs on the shards; ``form_axes`` are the axes
    along which the form communicates.
    """

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]
    form: str | None
    form_axes: tuple[int, ...]
    by_size: bool  # True if other sizes may lead to another choice

    def __repr__(self) -> str:
        return f"{self.ins} -> {self.outs}" + (f" by {self.form}" if self.form else "")


def choose(
    call: Call,
    specs: Sequence[TensorSpec],
    by_axis: Sequence[Sequence[Signature]],
    fixed_sbp: NdSbp | None,
) -> Choice | None:
    """Choose the cheapest signature of a call on each placement axis, one axis after the other.

    Args:
        call: the op, with its operands, and the shapes and dtypes of its outputs.
        specs: specs of the operands before boxing.
        by_axis: for each placement axis the signatures to choose from.
        fixed_sbp: for an in-place op, the nd-sbp that its first operand and first output must keep.

    Returns:
        The choice, or None if on some axis no signature keeps ``fixed_sbp`` and is compatible with
            those chosen for earlier axes.
    """
    chosen: list[Signature] = []
    form: str | None = None
    for axis, options in enumerate(by_axis):
        # One form serves all axes: after an axis has taken one, others may take it or none.
        allowed = [s for s in options if s.form is None or form is None or s.form == form]
        if fixed_sbp is not None:
            allowed = [
                s for s in allowed if s.ins[0] is fixed_sbp[axis] and s.outs[0] is fixed_sbp[axis]
            ]
        if chosen:
            allowed = [s for s in allowed if _have_one_partial_kind([*chosen, s])]
            allowed = [s for s in allowed if can_be_split(call, specs[0].placement, [*chosen, s])]
        if not allowed:
            return None
        best = _cheapest(call, specs, allowed, axis, _piece_counts(call, specs, by_axis, chosen))
        form = form or best.form
        chosen.append(best)
    return choice_of(call, specs, chosen)


def choice_of(call: Call, specs: Sequence[TensorSpec], chosen: Sequence[Signature]) -> Choice:
    """Return the ``Choice`` that takes the signature ``chosen[axis]`` on each axis.

    The SBPs of each operand and output, one per axis, are put together into its nd-sbp.
    """
    arity, out_count = len(specs), len(call.outs)
    ins = tuple(tuple(s.ins[i] for s in chosen) for i in range(arity))
    return Choice(
        ins,
        tuple(tuple(s.outs[i] for s in chosen) for i in range(out_count)),
        next((s.form for s in chosen if s.form is not None), None),
        tuple(a for a, s in enumerate(chosen) if s.form is not None),
        any(ins[i] != specs[i].sbp for i in range(arity)) or any(map(_depends_on_sizes, chosen)),
    )


def _have_one_partial_kind(chosen: Sequence[Signature]) -> bool:
    """Return whether every operand and output is partial in at most one way over the axes.

    P on one axis and P(max) on another is not allowed: a maximum of sums is not a sum of maxima.
    """
    sides = ([s.ins for s in chosen], [s.outs for s in chosen])
    return all(has_one_partial_kind(sbps) for side in sides for sbps in zip(*side, strict=True))


def can_be_split(call: Call, placement: Placement, chosen: Sequence[Signature]) -> bool:
    """Return whether operands and outputs can be split by the signatures ``chosen`` together.

    ``chosen`` has one signature for each of the first axes of ``placement``. False if a cut (an
    unbalanced division, such as a zigzag) does not fit the size of its dim, or if a later axis
    splits a dim that an earlier axis splits with a cut.
    """
    pairs = [(o.shape, [s.ins[i] for s in chosen]) for i, o in enumerate(call.operands)]
    pairs += [(o.shape, [s.outs[i] for s in chosen]) for i, o in enumerate(call.outs)]
    return all(invalid_cut_reason(tuple(sbp), placement, shape) is None for shape, sbp in pairs)


def _depends_on_sizes(option: Signature) -> bool:
    """Return whether other sizes could make ``option`` incorrect, or not the cheapest.

    A choice of such an option is not reused for calls of other sizes.
    """
    return option.by_size or option.nbytes > 0 or _makes_new_partial(option)


def _makes_new_partial(option: Signature) -> bool:
    """Return whether ``option`` makes a P (which must be reduced later) although no operand is P.

    Example: ``S(1), S(0) -> P`` of a matmul.
    """
    return any(e.is_partial for e in option.outs) and not any(e.is_partial for e in option.ins)


def _piece_counts(
    call: Call,
    specs: Sequence[TensorSpec],
    by_axis: Sequence[Sequence[Signature]],
    chosen: Sequence[Signature],
) -> list[int]:
    """Return for each output into how many pieces the axes other than the current one split it.

    The current axis is the first without a signature in ``chosen``. Earlier axes count as their
    chosen signature says. Later axes count as if they took the signature that needs no boxing, if
    there is one.
    """
    later_axes = range(len(chosen) + 1, len(by_axis))
    axis_signatures: list[tuple[int, Signature | None]] = [*enumerate(chosen)]
    axis_signatures += [(axis, _free_signature(by_axis[axis], specs, axis)) for axis in later_axes]
    shape = specs[0].placement.shape if specs else ()
    return [
        math.prod(shape[a] for a, s in axis_signatures if s is not None and s.outs[i].is_split)
        for i in range(len(call.outs))
    ]


def _free_signature(
    options: Sequence[Signature], specs: Sequence[TensorSpec], axis: int
) -> Signature | None:
    """Return the first signature that takes the operands as they are and sends nothing, or None."""
    current_sbps = tuple(spec.sbp[axis] for spec in specs)
    return next((s for s in options if s.ins == current_sbps and s.nbytes == 0), None)


def _cheapest(
    call: Call,
    specs: Sequence[TensorSpec],
    options: Sequence[Signature],
    axis: int,
    counts: Sequence[int],
) -> Signature:
    """Return the SBP signature among ``options`` to take on ``axis``.

    It is the one that needs no boxing, if there is one, unless that makes a P and another signature
    sends less; else the one with the least estimated seconds. ``counts`` is from ``_piece_counts``.
    """
    fitting = _free_signature(options, specs, axis)
    if fitting is not None:
        if not _makes_new_partial(fitting):
            return fitting
        # Reducing the P later costs no more than a form that joins now, and may never be needed.
        send_costs = [_message_seconds(call, specs, option, axis, counts) for option in options]
        if min(send_costs) >= send_costs[options.index(fitting)]:
            return fitting
    current_sbps = tuple(spec.sbp[axis] for spec in specs)
    # At equal cost prefer not to box the first operands, as a view must share their memory.
    costs = [
        (
            _rounded_cost(estimated_seconds(call, specs, option, axis, counts)),
            [w is not h for w, h in zip(option.ins, current_sbps, strict=True)],
            i,
        )
        for i, option in enumerate(options)
    ]
    return options[min(costs)[2]]


def _rounded_cost(cost: float) -> float:
    """Round a cost to 9 digits: sums of the same terms in another order then compare as equal."""
    return float(f"{cost:.9g}")


def estimated_seconds(
    call: Call, specs: Sequence[TensorSpec], option: Signature, axis: int, counts: Sequence[int]
) -> float:
    """Return the estimated seconds of a call if it takes the signature ``option`` on ``axis``.

    They are the seconds of boxing its operands and of all other messages (``_message_seconds``),
    and of reading and writing memory (``_memory_seconds``). ``counts`` has for each output the
    number of pieces into which the other axes split it.
    """
    return _message_seconds(call, specs, option, axis, counts) + _memory_seconds(
        call, specs, option, axis, counts
    )


def _message_seconds(
    call: Call, specs: Sequence[TensorSpec], option: Signature, axis: int, counts: Sequence[int]
) -> float:
    """Return the seconds of boxing, of a form's messages, and of later use of the outputs.

    A P among the outputs must be reduced later, and a split may have to be gathered if no operand
    was split. ``counts`` is as for ``estimated_seconds``.
    """
    placement = specs[0].placement
    parts, costs = placement.shape[axis], BUILT_IN[placement.type]
    message, bandwidth = costs.latency, costs.bandwidth
    # A split that no operand had costs one more message if the whole output is needed later.
    gather_seconds = 0.0 if any(spec.sbp[axis].is_split for spec in specs) else message
    total = 0.0
    for spec, in_sbp in zip(specs, option.ins, strict=True):
        target = spec.with_sbp((*spec.sbp[:axis], in_sbp, *spec.sbp[axis + 1 :]))
        total += boxing_seconds(spec, target)
    for out, out_sbp, pieces in zip(call.outs, option.outs, counts, strict=True):
        if parts == 1:
            continue
        if out_sbp.is_partial:  # an all-reduce, or a reduce-scatter, which leaves a split
            half = _nbytes(out) // pieces * (parts - 1) // parts / bandwidth
            total += message + half + min(half, gather_seconds)
        elif out_sbp.is_split:
            total += gather_seconds
    if option.nbytes:
        total += message + option.nbytes / bandwidth
    return total


def _memory_seconds(
    call: Call, specs: Sequence[TensorSpec], option: Signature, axis: int, counts: Sequence[int]
) -> float:
    """Return the seconds in which a rank reads its shards of the operands and writes its outputs.

    They are bytes divided by the bandwidth of memory. So a split is cheaper than computing the same
    on every rank.
    """
    placement = specs[0].placement
    nbytes = 0.0
    for spec, in_sbp in zip(specs, option.ins, strict=True):
        nbytes += _bytes_per_rank(
            spec.nbytes // pieces_by_other_axes(placement, spec.sbp, axis),
            in_sbp,
            placement.shape[axis],
        )
    for out, out_sbp, pieces in zip(call.outs, option.outs, counts, strict=True):
        nbytes += _bytes_per_rank(_nbytes(out) // pieces, out_sbp, placement.shape[axis])
    return nbytes / BUILT_IN[placement.type].memory


def _nbytes(out: Out) -> int:
    return out.shape.numel() * out.dtype.itemsize


def pieces_by_other_axes(placement: Placement, sbp: NdSbp, axis: int) -> int:
    """Return into how many pieces the axes other than ``axis`` split a tensor with this nd-sbp.

    On a (2, 4) placement, (S(0), B) is in 2 pieces apart from axis 1, and in 1 apart from axis 0.
    """
    pairs = enumerate(zip(placement.shape, sbp, strict=True))
    return math.prod(n for a, (n, entry) in pairs if a != axis and entry.is_split)


def _bytes_per_rank(nbytes: int, entry: Sbp, parts: int) -> float:
    """Return the bytes that a rank holds of ``nbytes``: all, or 1 / ``parts`` if split."""
    return nbytes / parts if isinstance(entry, Split) else nbytes
