"""Attention: ``softmax(q k^T) v``. Batches, heads and query rows are independent of each other, and
so are the columns of the values; the result is linear in the values.
"""

from __future__ import annotations

from ..spec import Split
from . import notation
from .signature import Call, Operand, Signature
from .table import Row, add_rows


def attention(call: Call, parts: int) -> list[Signature]:
    """``...l[e], ...[se], ...[s]v, ...l[s] -> ...lv``; under ``is_causal`` rows must know where
    they are: ``[l]``."""
    q, k, v = (call.get(name) for name in ("query", "key", "value"))
    mask = call.get("attn_mask")
    given = [t for t in (q, k, v, mask) if isinstance(t, Operand)]
    if [t.index for t in given] != list(range(len(call.operands))):
        return [call.whole()]
    rows = "[l]" if call.get("is_causal", False) else "l"
    rule = f"...{rows}[e], ...[se], ...[s]v"
    if mask is not None:
        rule += f", ...{rows}[s]" if mask.ndim > 1 else ", [s]"
    shapes = tuple(tuple(operand.shape) for operand in call.operands)
    made = list(notation.signatures(f"{rule} -> ...{rows}v", shapes, (2,)))
    if call.get("enable_gqa", False):
        made = [s for s in made if _groups_stay(call, s, (q, k, v))]
    if call.get("dropout_p", 0.0):
        made = [Signature(s.ins, s.outs, "attention") for s in made]
    return made


def _groups_stay(call: Call, made: Signature, operands: tuple[Operand, ...]) -> bool:
    """Heads that share a key stay with it: heads of q, k and v are cut alike, and evenly."""
    cut = [
        isinstance(s, Split) and s.dim == t.ndim - 3
        for s, t in zip(made.ins, operands, strict=False)
    ]
    if not any(cut):
        return True
    size = operands[0].spec.placement.size
    if all(t.shape[-3] == 1 for t in operands[1:]):
        return operands[0].shape[-3] >= size
    return all(cut) and all(t.shape[-3] % size == 0 for t in operands)


ROWS = (
    Row(
        "scaled_dot_product_attention",
        attention,
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        by_value=True,
    ),
)  # fmt: skip

add_rows(ROWS)
