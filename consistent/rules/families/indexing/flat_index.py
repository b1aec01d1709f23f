"""Rules of ops that index elements in row-major order, as if the tensor were flattened.

Each rank knows the positions of its own elements in the flattened tensor, so every dim may be
split.
"""

from __future__ import annotations

from typing import Any

from ....spec import P, S
from ...signature import Call, Operand, Signature
from ...table import Row, add_rows
from .data_dependent import masked


def taken(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of take, and of take_along_dim without a dim: ``S(d), B -> P``.

    A rank reads 0 for elements of other ranks, so that the results add up. If the index is split
    instead, so is the result: ``B, S(d) -> S(d)``.
    """
    x, index = call.operands[0], call.get("index")
    made = [call.whole(), call.make({0: P}, P)]
    made += [call.make({0: S(d)}, P, "take") for d in range(x.ndim)]
    if index.shape != call.outs[0].shape:
        return made
    return made + [call.make({index.index: S(d)}, S(d)) for d in range(index.ndim)]


def put(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of put: ``S(d), B, B -> S(d)``.

    Each rank writes those of the values whose position is in its shard. With ``accumulate``, tensor
    and values may both be P, since writing adds them.
    """
    index, source = call.get("index"), call.get("source")
    made = [
        call.whole(),
        *(call.make({0: S(d)}, S(d), "put") for d in range(call.operands[0].ndim)),
    ]
    if call.get("accumulate", False):
        made.append(call.make({0: P, source.index: P}, P))
        if index.shape == source.shape:
            ins = {index.index, source.index}
            made += [call.make({0: P, **dict.fromkeys(ins, S(d))}, P) for d in range(index.ndim)]
    return made


def masked_scatter(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of masked_scatter: any dim of the tensor may be split.

    The k-th True of the mask takes the k-th value, so a rank must know how many Trues come before
    its own. Either it has the whole mask, or mask and tensor are split along the first dim, and
    ranks exchange how many Trues each has.
    """
    x, mask = call.operands[0], call.get("mask")
    if x.shape != call.outs[0].shape:
        return [call.whole()]
    made = [call.whole()] + [call.make({0: S(d)}, S(d), "masked_scatter") for d in range(x.ndim)]
    if x.ndim and x.spec.placement.ndim == 1 and mask.shape == x.shape:
        nbytes = 8 * (parts - 1)
        made.append(call.make({0: S(0), mask.index: S(0)}, S(0), "masked_scatter", nbytes))
    return made


def masked_write(call: Call, value: Any) -> list[Signature]:
    """Return the SBP signatures of x[mask] = value, where x may be split along any dim.

    ``value`` is written wherever the mask is True, or has one row for each True. Rows are assigned
    to Trues in order, as by masked_scatter.
    """
    found = masked(call)
    assert found is not None
    x, mask = found
    each = isinstance(value, Operand) and value.ndim == x.ndim - mask.ndim + 1
    each = each and value.shape[0] != 1
    form = "masked_write" if each else None
    made = [call.whole()]
    for d in range(x.ndim):
        if d < mask.ndim and not each:
            made.append(call.make({0: S(d), mask.index: S(d)}, S(d)))
        elif d < mask.ndim:
            made.append(call.make({0: S(d)}, S(d), form))
        else:
            place = d - x.ndim + value.ndim if isinstance(value, Operand) else -1
            cut = place >= 0 and value.shape[place] == x.shape[d]
            ins = {0: S(d), **({value.index: S(place)} if cut else {})}
            made.append(call.make(ins, S(d)))
    if each and x.spec.placement.ndim == 1:
        nbytes = 8 * (call.operands[0].spec.placement.size - 1)
        made.append(call.make({0: S(0), mask.index: S(0)}, S(0), form, nbytes))
    return made


ROWS = (
    Row("masked_scatter", masked_scatter, "input mask source"),
    Row("put", put, "input index source accumulate"),
    Row("take", taken, "input index"),
)

add_rows(ROWS)
