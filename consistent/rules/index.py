"""x[...] and x[...] = v.

Dims sliced whole keep their split; along another split dim each rank deals with what it holds.
"""

from __future__ import annotations

from typing import Any

from ..spec import P, S, Sbp
from .counted import masked, masked_outs, picked
from .flat import masked_write
from .indexing import Index, index_of, look_shape
from .signature import Call, Operand, Signature
from .table import Row, add_rows
from .window import windows

READ, WRITE, WRITE_LOOK = "read_window", "write_window", "write_look"


def read(call: Call, parts: int) -> list[Signature]:
    """Reading: P passes; what lies outside a rank's shard counts as 0 there, so the result is P."""
    if masked(call):
        return picked(call, parts)
    index = index_of(call)
    made = [call.whole(), call.make({0: P}, P)]
    for item in index.of("all"):
        # narrow, unlike a slice, does not clamp what it is asked for.
        acted = "length" in call.params and item.dim == call.dim("dim")
        made.append(call.make({0: S(item.dim)}, S(index.places[item.dim]), READ if acted else None))
    runs = windows(call, parts, [item.dim for item in index.of("range")])
    fetched = {s.ins[0] for s in runs}
    for item in index.of("range", "pick"):
        if S(item.dim) not in fetched:
            made.append(call.make({0: S(item.dim)}, P, READ))
    made += runs
    made += [call.make({0: S(item.dim)}, P, READ) for item in index.looks]
    return made + _split_block(call, index)


def _split_block(call: Call, index: Index) -> list[Signature]:
    """Index tensors split among themselves: each rank looks up its own."""
    made = []
    place, shape = index.block
    for b in range(len(shape)):
        ins: dict[int, Sbp] = {}
        for item in index.looks:
            own = look_shape(item.look)
            d = b - len(shape) + len(own)
            if d < 0 or (own[d] == 1 and shape[b] != 1):
                continue
            if not isinstance(item.look, Operand):
                break  # a list is whole
            ins[item.look.index] = S(d)
        else:
            if ins:
                made.append(call.make(ins, S(place + b)))
    return made


def write(call: Call, parts: int) -> list[Signature]:
    """Writing in place, or into a copy: the value is split like the region it fills."""
    value = call.args[2] if call.name == "setitem" else call.get("values")
    if not isinstance(value, Operand | int | float | complex):
        raise TypeError("a value that is no tensor and no number")
    if masked(call) and call.name == "setitem":
        return masked_write(call, value)
    index = index_of(call)
    made = [call.whole()]
    looks = bool(index.looks)
    for item in index.of("all"):
        ins = {0: S(item.dim), **_split_value(call, index, value, index.places[item.dim])}
        made.append(call.make(ins, S(item.dim)))
    if not looks:
        made += [
            call.make({0: S(item.dim)}, S(item.dim), WRITE) for item in index.of("range", "pick")
        ]
    made += [call.make({0: S(item.dim)}, S(item.dim), WRITE_LOOK) for item in index.looks]
    if "accumulate" in call.params and call.get("accumulate", False):
        made += _added_by_entry(call, index, value)
    return made + _written_partial(call, looks, value)


def _split_value(call: Call, index: Index, value: Any, place: int) -> dict[int, Sbp]:
    (size,) = (call.operands[0].shape[k] for k, at in index.places.items() if at == place)
    return _split_at(index, value, place, size)


def _split_at(index: Index, value: Any, place: int, size: int) -> dict[int, Sbp]:
    """The value split where the region that it fills is split at ``place``; B where it
    broadcasts."""
    if not isinstance(value, Operand):
        return {}
    region = len(index.left) - len(index.looks) + len(index.block[1])
    d = place - region + value.ndim
    return {value.index: S(d)} if d >= 0 and value.shape[d] == size else {}


def _added_by_entry(call: Call, index: Index, value: Any) -> list[Signature]:
    """Sums: each rank adds its share of the entries."""
    made, (place, shape) = [], index.block
    for split in _split_block(call, index):
        at = split.outs[0].dim  # type: ignore[attr-defined]
        ins = {i: entry for i, entry in enumerate(split.ins) if entry.is_split}
        ins |= _split_at(index, value, at, shape[at - place])
        made.append(call.make({**ins, 0: P}, P))
    return made


def _written_partial(call: Call, looks: bool, value: Any) -> list[Signature]:
    """P: linear in x and the value together.

    Where a place is written twice, ranks could differ in who wins.
    """
    adds = "accumulate" in call.params and call.get("accumulate", False)
    if isinstance(value, Operand):
        alike = value.spec.dtype == call.operands[0].spec.dtype
        return [call.make({0: P, value.index: P}, P)] if alike and (adds or not looks) else []
    return [call.make({0: P}, P)] if isinstance(value, int) and value == 0 else []


ROWS = (
    Row("getitem", read, outs=masked_outs, moves=True),
    Row("index", read, "input indices", outs=masked_outs, moves=True),
    Row("index_put", write, "input indices values accumulate"),
    Row("narrow narrow_copy", read, "input dim start length", moves=True),
    Row("select", read, "input dim index", moves=True),
    Row("setitem", write),
    Row("slice", read, "input dim start end step", moves=True),
)  # fmt: skip

add_rows(ROWS)
