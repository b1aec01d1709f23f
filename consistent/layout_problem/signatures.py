"""Signatures (layouts of operands and results) that a search may choose for an op, and the cost of
the op's work in these layouts.

Both the search for a model's plan and the search for a recorded step's layouts use them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost_model.model import CostModel
from ..cost_model.work import Work
from ..rules.choose import Choice
from ..rules.signature import Call, Signature
from ..spec import NdSbp, Split, TensorSpec
from .costs import flops_of, work_divisor

# Forward, and in backward a gradient for each of its two operands: three times the work.
_WITH_BACKWARD = 3


def is_searchable(signature: Signature, call: Call, parts: int) -> bool:
    """Return whether a search may choose ``signature`` on an axis of ``parts`` ranks.

    It may not if

    * a rank would get nothing of a split tensor,
    * a tensor that is written in place would change its layout, or
    * a tensor would be P(max) or P(min), which have no gradient.
    """
    if any(e.is_extreme for e in (*signature.ins, *signature.outs)):
        return False
    if call.inplace and signature.ins[0] is not signature.outs[0]:
        return False
    pairs = [(e, x.shape) for e, x in zip(signature.ins, call.operands, strict=True)]
    pairs += [(e, x.shape) for e, x in zip(signature.outs, call.outs, strict=True)]
    return all(not isinstance(e, Split) or shape[e.dim] >= parts for e, shape in pairs)


def has_one_form(chosen: Sequence[Signature]) -> bool:
    """Return whether the signatures, one per mesh axis, use at most one form.

    One call runs one form, the local code in place of the op, for all axes.
    """
    return len({s.form for s in chosen if s.form is not None}) < 2


def layouts_of(chosen: Sequence[Signature]) -> tuple[tuple[NdSbp, ...], tuple[NdSbp, ...]]:
    """Return the nd-SBPs of every operand and of every output, from one signature per mesh axis.

    Of ``mm``: ``S(0), B -> S(0)`` and ``B, S(1) -> S(1)`` give ((S(0), B), (B, S(1))), ((S(0),
    S(1)),).
    """
    ins = tuple(zip(*(s.ins for s in chosen), strict=True))
    return ins, tuple(zip(*(s.outs for s in chosen), strict=True))


def signature_of_choice(
    axis: int, choice: Choice, options: Sequence[Signature]
) -> Signature | None:
    """Return the signature among ``options`` that ``choice`` takes on mesh axis ``axis``, or None.

    ``choice`` has the layouts and the form that a run would choose. Of several signatures with
    these, the one whose form sends least is returned.
    """
    ins, outs = (tuple(sbp[axis] for sbp in side) for side in (choice.ins, choice.outs))
    form = choice.form if axis in choice.form_axes else None
    matches = (s for s in options if (s.ins, s.outs, s.form) == (ins, outs, form))
    return min(matches, key=lambda s: s.nbytes, default=None)


def op_work(
    costs: CostModel,
    call: Call,
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    layouts: tuple[Sequence[NdSbp], Sequence[NdSbp]],
    tracked: bool,
) -> tuple[float, int]:
    """Return (seconds of an op's work, bytes of its results) on each rank.

    The seconds that any op takes to start are left out: they are the same in all layouts.

    Args:
        costs: the machine's cost model.
        call: the op.
        specs: specs of its operands and of its results, in any layouts.
        layouts: the layouts of its operands and of its results.
        tracked: whether the seconds of its backward are included: twice those of forward.
    """
    operand_bytes, result_bytes = (
        sum(spec.with_sbp(sbp).largest_nbytes for spec, sbp in zip(*side, strict=True))
        for side in zip(specs, layouts, strict=True)
    )
    grid = next(spec.placement.shape for side in specs for spec in side)
    flops = flops_of(call) / work_divisor(grid, (*layouts[0], *layouts[1]))
    dtype = next(spec.dtype for side in specs for spec in side)
    kind = "matmul" if flops else "other"
    seconds = costs.busy_seconds(
        Work(call.name, kind, dtype, flops, operand_bytes + result_bytes, None)
    )
    return seconds * (_WITH_BACKWARD if tracked else 1), result_bytes
