"""Rule of ``flex_attention``: attention whose scores and mask are functions of positions.

Batches, heads and rows of the query are independent of each other. The functions get logical
positions (``forms/families/layers/flex_attention.py``), so any rank may compute any of the scores.
"""

from __future__ import annotations

import torch

from ....spec import B, S, Sbp, Split
from ...choose import pieces_by_other_axes
from ...signature import Call, DoesNotFit, Operand, Out, Signature
from ...table import Row, add_rows

FORM = "flex_attention"


def flex_attention(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of flex_attention: batches, heads, or query rows are split.

    q, k, v have shape (batch, heads, rows, columns). Heads are split if each rank then has the keys
    of its heads. If keys are split as the rows are, they are sent to the ranks whose rows attend to
    them.
    """
    q, k, v = _query_key_value(call)
    size = q.spec.placement.size
    signatures = [_signature(call, {}, B, 0)]
    if q.shape[0] == k.shape[0]:
        signatures.append(_signature(call, {x.index: S(0) for x in (q, k, v)}, S(0), 0))
    else:
        signatures.append(_signature(call, {q.index: S(0)}, S(0), 0))
    if q.shape[1] % size == 0 and k.shape[1] % size == 0:
        signatures.append(_signature(call, {x.index: S(1) for x in (q, k, v)}, S(1), 0))
    elif k.shape[1] == 1 and q.shape[1] >= size:
        signatures.append(_signature(call, {q.index: S(1)}, S(1), 0))
    query_sbp = q.spec.sbp[call.axis]
    rows = query_sbp if isinstance(query_sbp, Split) and query_sbp.dim == 2 else S(2)
    if rows.cut is None or rows.cut.invalid_reason(q.shape[2], parts) is None:
        signatures.append(_signature(call, {q.index: rows}, rows, 0))
    if rows.cut is None or rows.cut.invalid_reason(k.shape[2], parts) is None:
        sent_fraction = (
            (parts - 1) / parts / pieces_by_other_axes(q.spec.placement, q.spec.sbp, call.axis)
        )
        nbytes = int((k.spec.nbytes + v.spec.nbytes) * sent_fraction)
        signatures.append(_signature(call, {x.index: rows for x in (q, k, v)}, rows, nbytes))
    return signatures


def _signature(call: Call, ins: dict[int, Sbp], out: Sbp, nbytes: int) -> Signature:
    return call.new_signature(ins, out, FORM, nbytes)


def _query_key_value(call: Call) -> tuple[Operand, Operand, Operand]:
    """Return (q, k, v).

    Raises:
        DoesNotFit: they are not three tensors of 4 dims.
    """
    q, k, v = call.require_operands(3)
    if (q.ndim, k.ndim, v.ndim) != (4, 4, 4):
        raise DoesNotFit
    return q, k, v


def _outs(call: Call) -> tuple[Out, ...]:
    """Return the outputs: the result, and for each row the log-sum-exp and the largest score."""
    q, _, v = _query_key_value(call)
    wide = torch.float64 if q.spec.dtype is torch.float64 else torch.float32
    rows = torch.Size(q.shape[:3])
    return (
        Out(torch.Size((*rows, v.shape[-1])), q.spec.dtype), Out(rows, wide), Out(rows, wide),
    )  # fmt: skip


ROWS = (
    Row(
        "flex_attention",
        flex_attention,
        "query key value mods scale enable_gqa",
        outs=_outs,
        composite=True,
        by_value=True,
    ),
)

add_rows(ROWS)
