"""Options of an op in a layout problem: the layouts that its rules allow, with their costs.

A search says which signatures an op may take on each mesh axis; the options are their combinations
that one call can run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from ..cost_model.model import CostModel
from ..graph.global_ops import Op, Value
from ..rules.choose import can_be_split
from ..rules.signature import Signature
from ..spec import NdSbp, has_one_partial_kind
from .costs import sending_seconds
from .problem import Option, Problem
from .signatures import has_one_form, layouts_of, op_work

_MAX_COMBINATIONS = 64  # combinations of signatures on all axes; beyond, only one axis may change


def op_options(
    problem: Problem, values: Sequence[Value], op: Op, combinations: Iterable[Sequence[Signature]]
) -> list[Option]:
    """Return the options of ``op`` in ``problem``: the layouts that it may take, with their costs.

    Of several combinations with the same layouts only the cheapest is returned.

    Args:
        problem: the layout problem, for its cost model.
        values: the values of the step.
        op: the op.
        combinations: combinations of one signature per mesh axis. Those that split a tensor in a
            way that no rank can hold, such as one custom cut inside another, are left out.
    """
    placement = next(values[v].spec.placement for v in (*op.ins, *op.outs))
    possible = (
        signatures for signatures in combinations if can_be_split(op.call, placement, signatures)
    )
    return cheapest_options(_op_option(problem, values, op, signatures) for signatures in possible)


def _op_option(
    problem: Problem, values: Sequence[Value], op: Op, signatures: Sequence[Signature]
) -> Option:
    """Return the option of ``op`` in which it takes ``signatures``, one for each mesh axis."""
    layouts, sent_bytes = layouts_of(signatures), [s.nbytes for s in signatures]
    seconds, kept_bytes = cost_of_op(problem.costs, values, op, layouts, sent_bytes)
    return Option(
        *layouts, seconds, problem.counted_bytes(kept_bytes, sum(sent_bytes)), tuple(signatures)
    )


def cost_of_op(
    costs: CostModel,
    values: Sequence[Value],
    op: Op,
    layouts: tuple[Sequence[NdSbp], Sequence[NdSbp]],
    sent: Sequence[int],
) -> tuple[float, int]:
    """Return (seconds of forward and backward, bytes kept for backward) of an op in these layouts.

    Seconds of boxing its operands are not included: they are on the edges of the problem.

    Args:
        costs: the machine's cost model.
        values: the values of the step.
        op: the op.
        layouts: those of its operands and of its results.
        sent: for each mesh axis, the bytes that the op itself sends, in the form (local code) that
            runs in its place.
    """
    seconds, kept_bytes = 0.0, 0
    if not op.view:
        specs = [values[v].spec for v in op.ins], [values[v].spec for v in op.outs]
        tracked = any(values[v].tracked for v in op.outs)
        seconds, result_bytes = op_work(costs, op.call, specs, layouts, tracked)
        kept_bytes = result_bytes if tracked else 0
    if any(sent):
        seconds += sending_seconds(costs, values[op.ins[0]].spec.placement, sent)
    return seconds, kept_bytes


def cheapest_options(options: Iterable[Option]) -> list[Option]:
    """Return ``options`` with only the cheapest of those with equal layouts, in their order.

    The cheapest holds the fewest bytes, and among equals takes the fewest seconds.
    """
    best: dict[tuple, Option] = {}
    for option in options:
        key = option.ins, option.outs
        known = best.get(key)
        if known is None or (option.nbytes, option.seconds) < (known.nbytes, known.seconds):
            best[key] = option
    return list(best.values())


def signature_combinations(
    axes: Sequence[Sequence[Signature]], around: Sequence[Signature] | None = None
) -> list[tuple[Signature, ...]]:
    """Return the combinations of one signature per mesh axis that a single call can run.

    A call runs one form, for all axes, and no tensor may have two kinds of partial value, such as a
    sum and a maximum.

    Args:
        axes: for each mesh axis the signatures to combine.
        around: a combination. If there are more than ``_MAX_COMBINATIONS`` combinations, only those
            are returned that differ from ``around`` on at most one axis.
    """
    if around is None or math.prod(map(len, axes)) <= _MAX_COMBINATIONS:
        combinations: Iterable[tuple[Signature, ...]] = itertools.product(*axes)
    else:
        combinations = _neighbours(around, axes)
    return [
        chosen for chosen in combinations if has_one_form(chosen) and _has_one_partial_kind(chosen)
    ]


def _has_one_partial_kind(chosen: Sequence[Signature]) -> bool:
    return all(has_one_partial_kind(sbp) for side in layouts_of(chosen) for sbp in side)


def _neighbours(
    base: Sequence[Signature], axes: Sequence[Sequence[Signature]]
) -> list[tuple[Signature, ...]]:
    """Return ``base``, and the combinations that differ from it on one axis."""
    combinations = [tuple(base)]
    for axis, options in enumerate(axes):
        combinations += [(*base[:axis], s, *base[axis + 1 :]) for s in options]
    return list(dict.fromkeys(combinations))
