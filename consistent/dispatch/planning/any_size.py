"""Plans that serve tensors of all sizes: which plans can, and the layouts of their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...rules.choose import Choice
from ...rules.signature import Call, Out
from ...rules.table import Row, Sizing
from ...spec import Layout, Placement, Sbp, Split, TensorSpec
from ..plans.plan import LengthSource, OutLayout


def out_layouts(
    row: Row, call: Call, choice: Choice, outs: Sequence[Out], placement: Placement
) -> tuple[OutLayout, ...] | None:
    """Return the output layouts for a plan that serves all sizes, or None if the sizes decide."""
    if choice.form is not None or choice.by_size or not row.serves_any_size(call, choice.ins):
        return None
    made = []
    for out, sbp in zip(outs, choice.outs, strict=True):
        sources = _sources(row, call, choice, out.shape, sbp)
        if sources is None or out.data_dependent:
            return None
        made.append(OutLayout(Layout.of(placement, sbp), sources))
    # One entry suffices if all are equal: the last entry serves all further outputs, and the number
    # of outputs may vary with the sizes.
    return tuple(made[:1]) if len(set(made)) == 1 else tuple(made)


def _sources(
    row: Row, call: Call, choice: Choice, shape: torch.Size, sbp: Sequence[Sbp]
) -> tuple[LengthSource, ...] | None:
    """Return, for each split dim of an output, the operand dim that is split along with it.

    A signature without a form maps pieces to pieces for any number of items, so the two dims have
    the same length. Only a view can regroup dims; for views the hook checks the sizes when it runs
    the plan.
    """
    found = []
    for dim in sorted({e.dim for e in sbp if isinstance(e, Split)}):
        axes = [axis for axis, e in enumerate(sbp) if isinstance(e, Split) and e.dim == dim]
        size = None if row.sizing is Sizing.VIEW else shape[dim]
        source = _source(call, choice, size, axes)
        if source is None:
            return None
        grid = call.operands[0].spec.placement.shape
        found.append(LengthSource(dim, *source, math.prod(grid[axis] for axis in axes)))
    return tuple(found)


def _source(
    call: Call, choice: Choice, size: int | None, axes: Sequence[int]
) -> tuple[int, int] | None:
    """Return the (operand, dim) that ``axes`` split and that gives an output dim its length.

    The dim must have ``size`` items, unless ``size`` is None. Returns None if there is no such dim.
    """
    for operand, ins in zip(call.operands, choice.ins, strict=True):
        entries = {ins[axis] for axis in axes}
        entry = entries.pop()
        if not entries and isinstance(entry, Split) and size in (None, operand.shape[entry.dim]):
            return operand.index, entry.dim
    return None


def all_whole(specs: Sequence[TensorSpec]) -> bool:
    """Return whether all operands are replicated (B on each axis), so that sizes decide nothing."""
    return all(spec.layout.is_whole for spec in specs)
