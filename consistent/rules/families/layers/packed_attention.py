"""Rule of attention on documents packed one after the other: ``torch.nn.attention.varlen``.

Tokens are dim 0 and heads dim 1. The beginnings of documents are read from ``cu_seq_q`` and
``cu_seq_k``, which every rank has whole. Heads are independent of each other. Rows and keys may be
split in any way that is the same for both, and a rank gets only the keys of its rows' documents.
"""

from __future__ import annotations

import torch

from ....spec import B, S, Split
from ...choose import pieces_by_other_axes
from ...signature import Call, DoesNotFit, Operand, Out, Signature
from ...table import Row, add_rows

FORM = "packed_attention"


def packed_attention(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of _varlen_attn: heads are split, or rows and keys in the same way.

    q, k, v have shape (tokens, heads, columns). The result has the layout of q. So has the
    log-sum-exp of each row, in which the heads are dim 0 and the tokens dim 1.
    """
    q, k, v, _ = _operands(call)
    signatures = [_signature(call, {}, 0)]
    if _heads_divide(q, k, q.spec.placement.size):
        signatures.append(_signature(call, {x.index: S(1) for x in (q, k, v)}, 0))
    query_sbp = q.spec.sbp[call.axis]
    cut = query_sbp.cut if isinstance(query_sbp, Split) and query_sbp.dim == 0 else None
    if q.shape[0] == k.shape[0] and (cut is None or cut.invalid_reason(q.shape[0], parts) is None):
        sent_fraction = (
            (parts - 1) / parts / pieces_by_other_axes(q.spec.placement, q.spec.sbp, call.axis)
        )
        nbytes = int((k.spec.nbytes + v.spec.nbytes) * sent_fraction)
        signatures.append(_signature(call, {x.index: Split(0, cut) for x in (q, k, v)}, nbytes))
    return signatures


def _signature(call: Call, ins: dict, nbytes: int) -> Signature:
    """Return the SBP signature for operand splits ``ins``; result and log-sum-exp split as q."""
    entry = ins.get(0, B)
    lse_sbp = Split(1 - entry.dim, entry.cut) if isinstance(entry, Split) else B
    return call.new_signature(ins, (entry, lse_sbp, B), FORM, nbytes)


def _heads_divide(q: Operand, k: Operand, size: int) -> bool:
    return q.shape[1] % size == 0 and k.shape[1] % size == 0


def _operands(call: Call) -> tuple[Operand, Operand, Operand, tuple[Operand, ...]]:
    """Return (q, k, v, the operands with the beginnings of documents) of a call.

    Raises:
        DoesNotFit: the call is for a cache in pages (``block_table``), or uses only a part of the
            keys (``seqused_k``), or has other shapes.
    """
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
    arguments = [call.get(name) for name in names]
    unsupported = [call.get(name) for name in ("seqused_k", "block_table")]
    tensors = [x for x in arguments if isinstance(x, Operand)]
    if (
        any(x is not None for x in unsupported)
        or len(tensors) != len(call.operands)
        or len(tensors) < 4
    ):
        raise DoesNotFit
    q, k, v, *starts = tensors
    if (q.ndim, k.ndim, v.ndim) != (3, 3, 3) or k.shape[1] != v.shape[1]:
        raise DoesNotFit
    return q, k, v, tuple(starts)


def _outs(call: Call) -> tuple[Out, ...] | None:
    """Return the outputs: result, log-sum-exp of each row, and a placeholder for the RNG state."""
    q, _, v, _ = _operands(call)
    tokens, heads, _ = q.shape
    out = torch.Size((tokens, heads, v.shape[-1]))
    return (
        Out(out, q.spec.dtype),
        Out(torch.Size((heads, tokens)), torch.float32, non_differentiable=True),
        Out(torch.Size((2,)), torch.uint64, non_differentiable=True),
    )


ROWS = (
    Row(
        "_varlen_attn",
        packed_attention,
        "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size enable_gqa "
        "seqused_k block_table num_splits",
        outs=_outs,
        by_value=True,
    ),
)

add_rows(ROWS)
