"""Rule of embedding_bag: the sum, mean or maximum of table rows, for each bag of indices."""

from __future__ import annotations

import torch

from ....spec import B, P, S
from ...signature import Call, Operand, Out, Signature
from ...table import Row, add_rows

SUM, MEAN, MAX = 0, 1, 2
_PARAMS = "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights"


def embedding_bag(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of embedding_bag: the table is split by columns, or by rows.

    Split by columns, ``S(1), B, B -> S(1)`` for the bags. Split by rows, each rank adds up the rows
    of a bag that it has: ``S(0), B, B -> P`` for sums and means. Outputs for backward, such as the
    sizes of bags, are B.
    """
    mode = call.get("mode", SUM)
    signatures = [call.broadcast_signature()]
    if call.get("sparse", False) or not isinstance(call.get("offsets"), Operand):
        return signatures
    other_outs = (B, B, S(1) if mode == MAX else B)
    signatures.append(call.new_signature({0: S(1)}, (S(1), *other_outs), "embedding_bag"))
    if mode != MAX:
        signatures.append(call.new_signature({0: P}, (P, *other_outs), "embedding_bag"))
        if not call.get("scale_grad_by_freq", False):
            signatures.append(call.new_signature({0: S(0)}, (P, *other_outs), "embedding_bag"))
    return signatures


def embedding_bag_outs(call: Call) -> list[Out] | None:
    """Return the outputs (bags, bag of each index, sizes of bags, positions of maxima).

    None, for a call without offsets, leaves them to torch. The lengths of the last three differ by
    device, and these are the largest.
    """
    weight, index, offsets = (call.get(name) for name in ("weight", "indices", "offsets"))
    if not isinstance(offsets, Operand):
        return None
    n = offsets.shape[0] - bool(call.get("include_last_offset", False))
    rows = (n, weight.shape[1])
    outs = [Out(torch.Size(rows), weight.spec.dtype, data_dependent=True)]
    for sizes in (index.shape, (n,), rows if call.get("mode", SUM) == MAX else (n,)):
        outs.append(Out(torch.Size(sizes), index.spec.dtype, data_dependent=True))
    return outs


ROWS = (
    Row(
        "embedding_bag",
        embedding_bag,
        f"{_PARAMS} include_last_offset padding_idx",
        outs=embedding_bag_outs,
    ),
)

add_rows(ROWS)
