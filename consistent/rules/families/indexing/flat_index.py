"""Rules of ops that index elements in row-major order, as if the tensor were flattened.

Each rank knows the positions of its own elements in the flattened tensor, so every dim may be
split.
"""

from __future__ import annotations

from typing import Any

from ....spec import P, S
from ...signature import Call, Operand, Signature
from ...table import Row, add_rows
from .data_dependent import operand_and_mask


def take(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of take, and of take_along_dim without a dim: ``S(d), B -> P``.

    A rank reads 0 for elements of other ranks, so that the results add up. If the index is split
    instead, so is the result: ``B, S(d) -> S(d)``.
    """
    x, index = call.operands[0], call.get("index")
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    signatures += [call.new_signature({0: S(d)}, P, "take") for d in range(x.ndim)]
    if index.shape != call.outs[0].shape:
        return signatures
    return signatures + [call.new_signature({index.index: S(d)}, S(d)) for d in range(index.ndim)]


def put(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of put: ``S(d), B, B -> S(d)``.

    Each rank writes those of the values whose position is in its shard. With ``accumulate``, tensor
    and values may both be P, since writing adds them.
    """
    index, source = call.get("index"), call.get("source")
    signatures = [
        call.broadcast_signature(),
        *(call.new_signature({0: S(d)}, S(d), "put") for d in range(call.operands[0].ndim)),
    ]
    if call.get("accumulate", False):
        signatures.append(call.new_signature({0: P, source.index: P}, P))
        if index.shape == source.shape:
            ins = {index.index, source.index}
            signatures += [
                call.new_signature({0: P, **dict.fromkeys(ins, S(d))}, P) for d in range(index.ndim)
            ]
    return signatures


def masked_scatter(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of masked_scatter: any dim of the tensor may be split.

    The k-th True of the mask takes the k-th value, so a rank must know how many Trues come before
    its own. Either it has the whole mask, or mask and tensor are split along the first dim, and
    ranks exchange how many Trues each has.
    """
    x, mask = call.operands[0], call.get("mask")
    if x.shape != call.outs[0].shape:
        return [call.broadcast_signature()]
    signatures = [call.broadcast_signature()] + [
        call.new_signature({0: S(d)}, S(d), "masked_scatter") for d in range(x.ndim)
    ]
    if x.ndim and x.spec.placement.ndim == 1 and mask.shape == x.shape:
        nbytes = 8 * (parts - 1)
        signatures.append(
            call.new_signature({0: S(0), mask.index: S(0)}, S(0), "masked_scatter", nbytes)
        )
    return signatures


def masked_write(call: Call, value: Any) -> list[Signature]:
    """Return the SBP signatures of x[mask] = value, where x may be split along any dim.

    ``value`` is written wherever the mask is True, or has one row for each True. Rows are assigned
    to Trues in order, as by masked_scatter.
    """
    x_and_mask = operand_and_mask(call)
    assert x_and_mask is not None
    x, mask = x_and_mask
    is_row_per_true = isinstance(value, Operand) and value.ndim == x.ndim - mask.ndim + 1
    is_row_per_true = is_row_per_true and value.shape[0] != 1
    form = "masked_write" if is_row_per_true else None
    signatures = [call.broadcast_signature()]
    for d in range(x.ndim):
        if d < mask.ndim and not is_row_per_true:
            signatures.append(call.new_signature({0: S(d), mask.index: S(d)}, S(d)))
        elif d < mask.ndim:
            signatures.append(call.new_signature({0: S(d)}, S(d), form))
        else:
            place = d - x.ndim + value.ndim if isinstance(value, Operand) else -1
            splits_value = place >= 0 and value.shape[place] == x.shape[d]
            ins = {0: S(d), **({value.index: S(place)} if splits_value else {})}
            signatures.append(call.new_signature(ins, S(d)))
    if is_row_per_true and x.spec.placement.ndim == 1:
        nbytes = 8 * (call.operands[0].spec.placement.size - 1)
        signatures.append(call.new_signature({0: S(0), mask.index: S(0)}, S(0), form, nbytes))
    return signatures


ROWS = (
    Row("masked_scatter", masked_scatter, "input mask source"),
    Row("put", put, "input index source accumulate"),
    Row("take", take, "input index"),
)

add_rows(ROWS)
