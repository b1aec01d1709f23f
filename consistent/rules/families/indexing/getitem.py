"""Rules of indexing: reading x[...] and writing x[...] = v.

Dims of which every item is read or written keep their split; along another split dim each rank
handles its own elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....spec import NdSbp, P, S, Sbp, Split
from ...halo.halo import with_halo
from ...layout.subscript import Subscript, index_shape, subscript_of
from ...signature import Call, DoesNotFit, Operand, Signature
from ...table import Row, add_rows
from .data_dependent import masked, masked_outs, selected_by_mask
from .flat_index import masked_write

READ, WRITE, WRITE_BY_INDEX = "read_slice", "write_slice", "write_by_index"
READ_PARTS = "read_parts"


def read(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of reading x[...]: dims read whole stay split, and P passes.

    Along a sliced dim, each rank fetches its piece of the result (the form "halo"), if every rank
    has one. Otherwise, along a dim from which an int, a slice or an index tensor selects, a rank
    reads 0 for elements of other ranks, so the result is P. Index tensors may be split as well.
    """
    if masked(call):
        return selected_by_mask(call, parts)
    index = subscript_of(call)
    made = [call.whole(), call.make({0: P}, P)]
    for item in index.of("all"):
        # narrow, unlike a slice, does not clamp its bounds.
        acted = "length" in call.params and item.dim == call.dim("dim")
        made.append(call.make({0: S(item.dim)}, S(index.places[item.dim]), READ if acted else None))
    fetching = with_halo(call, parts, [item.dim for item in index.of("slice")])
    fetched = {s.ins[0] for s in fetching}
    for item in index.of("slice", "int"):
        if S(item.dim) not in fetched:
            made.append(call.make({0: S(item.dim)}, P, READ))
    made += fetching
    made += [call.make({0: S(item.dim)}, P, READ) for item in index.tensors]
    return made + _of_parts(call, index) + _split_block(call, index)


def _of_parts(call: Call, index: Subscript) -> list[Signature]:
    """Return the SBP signature of a slice that reads whole parts of a dim that is S(d, of=...).

    ``of=`` gives the sizes of parts of the dim that are divided among the ranks one by one. Each
    rank keeps its pieces of the parts that are read, and nothing is sent.
    """
    x, found = call.operands[0], call.cut_split()
    if found is None:
        return []
    entry, cut = found
    if index.of("int", "new", "tensor") or len(index.of("slice")) != 1:
        return []
    (item,) = index.of("slice")
    if item.dim != entry.dim or item.step != 1:
        return []
    left = cut.of_parts(x.shape[item.dim], item.start, item.count)
    if left is None:
        return []
    return [call.make({0: entry}, Split(index.places[item.dim], *left), READ_PARTS, by_size=True)]


def _split_block(call: Call, index: Subscript) -> list[Signature]:
    """Return the SBP signatures that split the index tensors: each rank looks up its own indices.

    There is at most one for each dim of the shape to which the index tensors broadcast.
    """
    made = []
    place, shape = index.block
    for b in range(len(shape)):
        ins: dict[int, Sbp] = {}
        for item in index.tensors:
            own = index_shape(item.tensor)
            d = b - len(shape) + len(own)
            if d < 0 or (own[d] == 1 and shape[b] != 1):
                continue
            if not isinstance(item.tensor, Operand):
                break  # a list of ints is whole on every rank
            ins[item.tensor.index] = S(d)
        else:
            if ins:
                made.append(call.make(ins, S(place + b)))
    return made


def write(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of x[...] = value and index_put: ``S(d) -> S(d)`` for x.

    Along a dim that ``:`` writes whole, the value is split like x. Along a dim from which an index
    selects, every rank has all of the value, and writes what falls into its shard.
    """
    value = call.args[2] if call.name == "setitem" else call.get("values")
    if not isinstance(value, Operand | int | float | complex):
        raise DoesNotFit("a value that is neither a tensor nor a number")
    if masked(call) and call.name == "setitem":
        return masked_write(call, value)
    index = subscript_of(call)
    made = [call.whole()]
    by_tensors = bool(index.tensors)
    for item in index.of("all"):
        ins = {0: S(item.dim), **_split_value(call, index, value, index.places[item.dim])}
        made.append(call.make(ins, S(item.dim)))
    if not by_tensors:
        made += [
            call.make({0: S(item.dim)}, S(item.dim), WRITE) for item in index.of("slice", "int")
        ]
    made += [call.make({0: S(item.dim)}, S(item.dim), WRITE_BY_INDEX) for item in index.tensors]
    if "accumulate" in call.params and call.get("accumulate", False):
        made += _added_by_entry(call, index, value)
    return made + _written_partial(call, by_tensors, value)


def _split_value(call: Call, index: Subscript, value: Any, place: int) -> dict[int, Sbp]:
    """Return {index of the operand ``value``: its split} if dim ``place`` of x[...] is split."""
    (size,) = (call.operands[0].shape[k] for k, at in index.places.items() if at == place)
    return _split_at(index, value, place, size)


def _split_at(index: Subscript, value: Any, place: int, size: int) -> dict[int, Sbp]:
    """Return {index of the value's operand: its split} if x[...] is split at its dim ``place``.

    It is empty if the value is a number or broadcasts along that dim, so that every rank needs all
    of it. ``size`` is the size of the dim of x[...].
    """
    if not isinstance(value, Operand):
        return {}
    region = len(index.left) - len(index.tensors) + len(index.block[1])
    d = place - region + value.ndim
    return {value.index: S(d)} if d >= 0 and value.shape[d] == size else {}


def _added_by_entry(call: Call, index: Subscript, value: Any) -> list[Signature]:
    """Return the SBP signatures of index_put with ``accumulate`` with split indices and P of x.

    Each rank adds the values of its own indices to its addend of x.
    """
    made, (place, shape) = [], index.block
    for split in _split_block(call, index):
        at = split.outs[0].dim  # type: ignore[attr-defined]
        ins = {i: entry for i, entry in enumerate(split.ins) if entry.is_split}
        ins |= _split_at(index, value, at, shape[at - place])
        made.append(call.make({**ins, 0: P}, P))
    return made


def _written_partial(call: Call, by_tensors: bool, value: Any) -> list[Signature]:
    """Return the SBP signature with P of x and value: ``x[...] = value`` is linear in the two.

    It is left out if a position may be written twice without adding, as ranks could differ in which
    value is written last. ``by_tensors`` says whether index tensors select the positions.
    """
    adds = "accumulate" in call.params and call.get("accumulate", False)
    if isinstance(value, Operand):
        alike = value.spec.dtype == call.operands[0].spec.dtype
        return [call.make({0: P, value.index: P}, P)] if alike and (adds or not by_tensors) else []
    return [call.make({0: P}, P)] if isinstance(value, int) and value == 0 else []


def keeps_split_dim(call: Call, entry: Sbp) -> bool:
    """Return whether ``x[...]`` keeps every item of the dim that ``entry`` splits, in its order.

    Then any cut of the dim may stay. The answer is for the sizes of this call: ``0:n`` keeps all
    items of a dim of n.
    """
    if masked(call) or not isinstance(entry, Split):
        return False
    return any(item.dim == entry.dim for item in subscript_of(call).of("all"))


def takes_split_dims_whole(call: Call, ins: Sequence[NdSbp]) -> bool:
    """Return whether ``x[...]`` has ``:`` for each dim that ``ins`` splits.

    A plan of such a call may be used for all sizes. ``ins`` has the nd-sbp of each operand.
    """
    if len(call.operands) != 1:
        return False
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(isinstance(entry, list | bool) for entry in index):
        return False
    split = {entry.dim for entry in ins[0] if isinstance(entry, Split)}
    x = call.operands[0]
    unnamed = x.ndim - sum(entry is not None and entry is not Ellipsis for entry in index)
    dim = 0
    for entry in index:
        if entry is not None and entry is not Ellipsis:
            if dim in split and entry != slice(None):
                return False
        dim += unnamed if entry is Ellipsis else entry is not None
    return True


ROWS = (
    Row(
        "getitem", read, outs=masked_outs, moves=True, any_size=takes_split_dims_whole, numbers="*",
    ),
    Row("index", read, "input indices", outs=masked_outs, moves=True),
    Row("index_put", write, "input indices values accumulate"),
    # A split of the dim that the op acts on needs a form.
    Row(
        "narrow narrow_copy", read, "input dim start length",
        moves=True, any_size=True, numbers="start length",
    ),
    Row("select", read, "input dim index", moves=True, any_size=True, numbers="index"),
    Row("setitem", write),
    Row("slice", read, "input dim start end step", moves=True),
)  # fmt: skip

add_rows(ROWS)
