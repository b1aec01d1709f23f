"""Whether a plan serves all sizes, and which layouts its outputs then have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...rules.choose import Choice
from ...rules.signature import Call, Out
from ...rules.table import Row, Sizing
from ...spec import Layout, Placement, Sbp, Split, TensorSpec
from ..plans.plan import OutLayout, Source


def out_layouts(
    row: Row, call: Call, choice: Choice, outs: Sequence[Out], placement: Placement
) -> tuple[OutLayout, ...] | None:
    """The layouts of the outputs, whatever the sizes are; None where sizes decide something."""
    if choice.form is not None or choice.by_size or not row.serves_any_size(call, choice.ins):
        return None
    made = []
    for out, sbp in zip(outs, choice.outs, strict=True):
        sources = _sources(row, call, choice, out.shape, sbp)
        if sources is None or out.data_dependent:
            return None
        made.append(OutLayout(Layout.of(placement, sbp), sources))
    return tuple(made[:1]) if len(set(made)) == 1 else tuple(made)


def _sources(
    row: Row, call: Call, choice: Choice, shape: torch.Size, sbp: Sequence[Sbp]
) -> tuple[Source, ...] | None:
    """For each split dim of an output, the dim of an operand that is split with it.

    A signature without a form maps pieces to pieces for any number of items, so the two dims are
    equally long. Only a view regroups dims; there the hook looks at the sizes.
    """
    found = []
    for dim in sorted({e.dim for e in sbp if isinstance(e, Split)}):
        axes = [axis for axis, e in enumerate(sbp) if isinstance(e, Split) and e.dim == dim]
        size = None if row.sizing is Sizing.VIEW else shape[dim]
        source = _source(call, choice, size, axes)
        if source is None:
            return None
        grid = call.operands[0].spec.placement.shape
        found.append(Source(dim, *source, math.prod(grid[axis] for axis in axes)))
    return tuple(found)


def _source(
    call: Call, choice: Choice, size: int | None, axes: Sequence[int]
) -> tuple[int, int] | None:
    """(operand, its dim) that ``axes`` split, of ``size`` items if that is given."""
    for operand, ins in zip(call.operands, choice.ins, strict=True):
        entries = {ins[axis] for axis in axes}
        entry = entries.pop()
        if not entries and isinstance(entry, Split) and size in (None, operand.shape[entry.dim]):
            return operand.index, entry.dim
    return None


def all_whole(specs: Sequence[TensorSpec]) -> bool:
    """Whether every rank has all operands whole: then sizes decide nothing."""
    return all(spec.layout.is_whole for spec in specs)
