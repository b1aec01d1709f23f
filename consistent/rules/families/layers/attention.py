"""Rules of scaled_dot_product_attention: ``softmax(q k^T) v``.

Batches, heads and query rows are independent of each other, and so are the columns of the values;
the result is linear in the values. If q is split by rows and the keys are split, there are two
ways (on the right: what a rank sends):

```
q S(rows), k S, v S    k and v are gathered; q and the result stay           bytes of k + v
q B,       k S, v S    each rank attends to its keys, and the results are    two numbers a row, and
                       an addend each, once the ranks' softmaxes are joined  the addends' sum
```

If rows and keys have a cut (``S(d, cut="zigzag")``), or are long, the result has their layout, by
one of two forms. With g query heads per key head on n ranks the second sends less if n >= g + 2:

```
ring                   each rank's keys and values go round         (n-1)/n of k and v
heads                  to whole sequences of some heads, and back    (n-1)/n^2 of q, k, v and out
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....spec import DimCut, NdSbp, S, Sbp, Split
from ... import notation
from ...choose import pieces_by_other_axes
from ...signature import Call, Operand, Signature
from ...table import Row, add_rows

FORM = "attention"
RING, HEADS = "ring_attention", "heads_attention"
# With at least this many scores, balanced rows and keys use the forms RING and HEADS, too: these
# gather no keys, and make no causal mask.
RING_MIN_SCORES = 1 << 22


def attention(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of attention, by `f(...l[e], ...s[e]), ...sv, f(...ls) -> ...lv`.

    l are the query rows, s the keys, e and v the columns of queries and values. So batches, heads,
    query rows and columns of the values may be split, and also the keys. If rows are long, or split
    by a cut, rows and keys may both stay split: keys and values go from rank to rank (ring
    attention), or an all-to-all gives each rank whole sequences of some heads.
    """
    q, k, v = (call.get(name) for name in ("query", "key", "value"))
    mask = call.get("attn_mask")
    tensors = [t for t in (q, k, v, mask) if isinstance(t, Operand)]
    if [t.index for t in tensors] != list(range(len(call.operands))):
        return [call.broadcast_signature()]
    rule = "f(...l[e], ...s[e]), ...sv"
    if mask is not None:
        rule += ", f(...ls)" if mask.ndim > 1 else ", f(s)"
    signatures = notation.signatures_of_text(f"{rule} -> ...lv", call, parts)
    if call.get("enable_gqa", False):
        signatures = [s for s in signatures if _keeps_groups_together(call, s, (q, k, v))]
    offers_ring = [_offers_ring(call, entry) for entry in q.spec.sbp]
    ring_signatures = _ring_and_heads_signatures(call, parts) if offers_ring[call.axis] else []
    if ring_signatures and _cut_of(q.spec.sbp[call.axis]) is not None:
        # The result keeps the query's cut; the "heads" form boxes to heads and back.
        signatures = [s for s in signatures if not _splits_heads(s, q)]
    form = RING if any(offers_ring) else FORM  # one form serves all axes
    return [*(_with_form(call, s, parts, form) for s in signatures), *ring_signatures]


def _splits_heads(signature: Signature, query: Operand) -> bool:
    """Return whether ``signature`` splits the query along a batch or head dim."""
    entry = signature.ins[query.index]
    return isinstance(entry, Split) and entry.dim < query.ndim - 2


def _cut_of(entry: Sbp) -> DimCut | None:
    return entry.cut if isinstance(entry, Split) else None


def _offers_ring(call: Call, query_sbp: Sbp) -> bool:
    """Return whether the forms RING and HEADS are offered for a query whose SBP is ``query_sbp``.

    They are for rows with a cut, and for balanced rows whose matrix of scores would have LARGE
    elements or more.
    """
    q, k, v = call.operands[:3]
    if not isinstance(query_sbp, Split) or query_sbp.dim != q.ndim - 2 or not _supports_ring(call):
        return False
    is_balanced = query_sbp.cut is None
    return not is_balanced or (
        q.shape[-2] * k.shape[-2] >= RING_MIN_SCORES and q.shape[-2] == k.shape[-2]
    )


def _ring_and_heads_signatures(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of the forms RING and HEADS: q, k, v all have the query's split.

    The result has it too. HEADS is left out if heads do not divide among the ranks, or with
    dropout.
    """
    query_sbp = call.operands[0].spec.sbp[call.axis]
    q, k, v, *masks = call.operands
    assert isinstance(query_sbp, Split)
    if query_sbp.cut is not None and query_sbp.cut.invalid_reason(k.shape[-2], parts):
        return []
    ins = {x.index: Split(x.ndim - 2, query_sbp.cut) for x in (q, k, v)}
    by_rows = {x.index: Split(x.ndim - 2, query_sbp.cut) for x in masks if _differs_by_row(x)}
    placement = q.spec.placement
    sent_fraction = (parts - 1) / parts / pieces_by_other_axes(placement, q.spec.sbp, call.axis)
    nbytes = k.spec.nbytes + v.spec.nbytes
    signatures = [
        call.new_signature({**ins, **by_rows}, query_sbp, RING, int(nbytes * sent_fraction))
    ]
    dropout = call.get("dropout_p", 0.0)
    heads_divide = all(x.shape[-3] % placement.size == 0 for x in (q, k, v))
    if heads_divide and not dropout and all(x.ndim < 3 or x.shape[-3] == 1 for x in masks):
        out = call.outs[0]
        nbytes += q.spec.nbytes + out.shape.numel() * out.dtype.itemsize
        signatures.append(
            call.new_signature(ins, query_sbp, HEADS, int(nbytes * sent_fraction / parts))
        )
    return signatures


def _differs_by_row(mask: Operand) -> bool:
    """Return whether the mask differs between query rows, so that it is split with them."""
    return mask.ndim > 1 and mask.shape[-2] > 1


def _supports_ring(call: Call) -> bool:
    """Return whether the forms RING and HEADS support this call.

    They need 4 dims or more, floating-point tensors, equal batches, and with ``is_causal`` as many
    rows as keys. Other calls have only the signatures of the rule.
    """
    q, k, v, *masks = call.operands
    if min(q.ndim, k.ndim, v.ndim) < 4 or not q.spec.dtype.is_floating_point:
        return False
    if any(x.ndim < 2 for x in masks):
        return False
    causal = call.get("is_causal", False)
    if causal and q.shape[-2] != k.shape[-2]:
        return False
    batch_shapes = {tuple(x.shape[:-3]) for x in (q, k, v)}
    heads = q.shape[-3] if not call.get("enable_gqa", False) else k.shape[-3]
    heads_match = q.shape[-3] % max(1, k.shape[-3]) == 0 and k.shape[-3] == v.shape[-3] == heads
    return len(batch_shapes) == 1 and heads_match


def _with_form(call: Call, signature: Signature, parts: int, form: str) -> Signature:
    """Return ``signature`` with the form that it needs.

    No form is needed if attention of the shards is the result. Split keys need a form that joins
    the ranks' softmaxes. Split causal rows, and dropout, need one that knows the logical positions
    of rows and keys.
    """
    q, k = call.operands[:2]
    if signature.ins[1] is S(k.ndim - 2):
        rows = call.outs[0].shape[:-1].numel()
        # A maximum and a sum of each row, on every rank.
        nbytes = 2 * 2 * (parts - 1) * rows * q.spec.dtype.itemsize // parts
        return replace(signature, form=FORM, nbytes=nbytes)
    needs_positions = call.get("is_causal", False) and signature.ins[0] is S(q.ndim - 2)
    if needs_positions:
        return replace(signature, form=FORM)
    if call.get("dropout_p", 0.0):
        return replace(signature, form=form)
    return signature


def _keeps_groups_together(call: Call, signature: Signature, operands: tuple[Operand, ...]) -> bool:
    """Return whether the query heads that share a key head are on the rank that has the key head.

    It is for grouped-query attention. Heads of ``operands`` (q, k, v) must then be split in the
    same way and evenly, unless there is a single key head.
    """
    splits_heads = [
        isinstance(s, Split) and s.dim == t.ndim - 3
        for s, t in zip(signature.ins, operands, strict=False)
    ]
    if not any(splits_heads):
        return True
    size = operands[0].spec.placement.size
    if all(t.shape[-3] == 1 for t in operands[1:]):
        return operands[0].shape[-3] >= size
    return all(splits_heads) and all(t.shape[-3] % size == 0 for t in operands)


def _serves_any_size(call: Call, ins: Sequence[NdSbp]) -> bool:
    """Return whether signatures do not depend on sizes, so that one cached plan serves all sizes.

    While a model decodes, the keys grow by one with each token, and no new plan is made.
    """
    return not call.get("enable_gqa", False)


ROWS = (
    Row(
        "scaled_dot_product_attention",
        attention,
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        by_value=True,
        any_size=_serves_any_size,
    ),
)  # fmt: skip

add_rows(ROWS)
