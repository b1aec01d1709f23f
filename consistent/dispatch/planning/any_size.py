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
    """Return the layouts of a call's outputs in a form that holds for tensors of all sizes.

    The planner calls this to see whether the new plan may also be used for later calls with the
    same op and layouts but other sizes.

    Args:
        row: the op's row in the rule table.
        call: the call that is planned.
        choice: the signature chosen for it, one SBP per operand and output.
        outs: shapes and dtypes of the outputs of this call.
        placement: the placement of the operands.

    Returns:
        One layout per output (a single one if all are equal), or None if the sizes influence the
            plan, so that it serves only calls with the same sizes.
    """
    if choice.form is not None or choice.by_size or not row.serves_any_size(call, choice.ins):
        return None
    layouts = []
    for out, sbp in zip(outs, choice.outs, strict=True):
        sources = _length_sources(row, call, choice, out.shape, sbp)
        if sources is None or out.data_dependent:
            return None
        layouts.append(OutLayout(Layout.of(placement, sbp), sources))
    # One entry suffices if all are equal: the last entry serves all further outputs, and the number
    # of outputs may vary with the sizes.
    return tuple(layouts[:1]) if len(set(layouts)) == 1 else tuple(layouts)


def _length_sources(
    row: Row, call: Call, choice: Choice, shape: torch.Size, sbp: Sequence[Sbp]
) -> tuple[LengthSource, ...] | None:
    """Find, for each split dim of an output, the operand dim from which it has its length.

    For ``x + y`` with both split along dim 0, dim 0 of the output is as long as dim 0 of ``x``.
    Returns None if some split dim has no such operand dim.

    A signature without a form maps shards to shards whatever their number of items, so the two dims
    have the same length. Only a view can regroup dims; for views the hook checks the sizes when it
    runs the plan.
    """
    sources = []
    for dim in sorted({e.dim for e in sbp if isinstance(e, Split)}):
        axes = [axis for axis, e in enumerate(sbp) if isinstance(e, Split) and e.dim == dim]
        size = None if row.sizing is Sizing.VIEW else shape[dim]
        operand_dim = _find_operand_dim(call, choice, size, axes)
        if operand_dim is None:
            return None
        grid = call.operands[0].spec.placement.shape
        sources.append(LengthSource(dim, *operand_dim, math.prod(grid[axis] for axis in axes)))
    return tuple(sources)


def _find_operand_dim(
    call: Call, choice: Choice, size: int | None, axes: Sequence[int]
) -> tuple[int, int] | None:
    """Return (operand, dim): the operand dim that is as long as an output dim split by ``axes``.

    ``axes`` are axes of the placement. Each of them must split the operand dim, which must have
    ``size`` items unless ``size`` is None. Returns None if there is no such operand dim.
    """
    for operand, ins in zip(call.operands, choice.ins, strict=True):
        entries = {ins[axis] for axis in axes}
        entry = entries.pop()
        if not entries and isinstance(entry, Split) and size in (None, operand.shape[entry.dim]):
            return operand.index, entry.dim
    return None


def all_whole(specs: Sequence[TensorSpec]) -> bool:
    """Return whether all operands are replicated: B on each axis.

    The plan is then the same for all sizes.
    """
    return all(spec.layout.is_whole for spec in specs)
