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
from .data_dependent import masked_select, masked_select_outs, operand_and_mask
from .flat_index import masked_write

READ_SLICE, WRITE_SLICE, WRITE_BY_INDEX = "read_slice", "write_slice", "write_by_index"
READ_PARTS = "read_parts"


def getitem(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of reading x[...]: dims read whole stay split, and P passes.

    Along a sliced dim, each rank fetches its piece of the result (the form "halo"), if every rank
    has one. Otherwise, along a dim from which an int, a slice or an index tensor selects, a rank
    reads 0 for elements of other ranks, so the result is P. Index tensors may be split as well.
    """
    if operand_and_mask(call):
        return masked_select(call, parts)
    index = subscript_of(call)
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    for item in index.of_kind("all"):
        # narrow, unlike a slice, does not clamp its bounds.
        is_narrowed = "length" in call.params and item.dim == call.dim("dim")
        signatures.append(
            call.new_signature(
                {0: S(item.dim)}, S(index.out_dims[item.dim]), READ_SLICE if is_narrowed else None
            )
        )
    halo_signatures = with_halo(call, parts, [item.dim for item in index.of_kind("slice")])
    fetched_splits = {s.ins[0] for s in halo_signatures}
    for item in index.of_kind("slice", "int"):
        if S(item.dim) not in fetched_splits:
            signatures.append(call.new_signature({0: S(item.dim)}, P, READ_SLICE))
    signatures += halo_signatures
    signatures += [call.new_signature({0: S(item.dim)}, P, READ_SLICE) for item in index.tensors]
    return signatures + _read_parts_signatures(call, index) + _index_split_signatures(call, index)


def _read_parts_signatures(call: Call, index: Subscript) -> list[Signature]:
    """Return the SBP signature of a slice that reads whole parts of a dim that is S(d, of=...).

    ``of=`` gives the sizes of parts of the dim that are divided among the ranks one by one. Each
    rank keeps its pieces of the parts that are read, and nothing is sent.
    """
    x, split_and_cut = call.operands[0], call.split_and_cut()
    if split_and_cut is None:
        return []
    entry, cut = split_and_cut
    if index.of_kind("int", "new", "tensor") or len(index.of_kind("slice")) != 1:
        return []
    (item,) = index.of_kind("slice")
    if item.dim != entry.dim or item.step != 1:
        return []
    cut_of_part = cut.cut_of_slice(x.shape[item.dim], item.start, item.count)
    if cut_of_part is None:
        return []
    return [
        call.new_signature(
            {0: entry}, Split(index.out_dims[item.dim], *cut_of_part), READ_PARTS, by_size=True
        )
    ]


def _index_split_signatures(call: Call, index: Subscript) -> list[Signature]:
    """Return the SBP signatures that split the index tensors: each rank looks up its own indices.

    There is at most one for each dim of the shape to which the index tensors broadcast.
    """
    signatures = []
    place, shape = index.index_block
    for b in range(len(shape)):
        ins: dict[int, Sbp] = {}
        for item in index.tensors:
            own_shape = index_shape(item.tensor)
            d = b - len(shape) + len(own_shape)
            if d < 0 or (own_shape[d] == 1 and shape[b] != 1):
                continue
            if not isinstance(item.tensor, Operand):
                break  # a list of ints is whole on every rank
            ins[item.tensor.index] = S(d)
        else:
            if ins:
                signatures.append(call.new_signature(ins, S(place + b)))
    return signatures


def setitem(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of x[...] = value and index_put: ``S(d) -> S(d)`` for x.

    Along a dim that ``:`` writes whole, the value is split like x. Along a dim from which an index
    selects, every rank has all of the value, and writes what falls into its shard.
    """
    value = call.args[2] if call.name == "setitem" else call.get("values")
    if not isinstance(value, Operand | int | float | complex):
        raise DoesNotFit("a value that is neither a tensor nor a number")
    if operand_and_mask(call) and call.name == "setitem":
        return masked_write(call, value)
    index = subscript_of(call)
    signatures = [call.broadcast_signature()]
    by_tensors = bool(index.tensors)
    for item in index.of_kind("all"):
        ins = {0: S(item.dim), **_split_of_value(call, index, value, index.out_dims[item.dim])}
        signatures.append(call.new_signature(ins, S(item.dim)))
    if not by_tensors:
        signatures += [
            call.new_signature({0: S(item.dim)}, S(item.dim), WRITE_SLICE)
            for item in index.of_kind("slice", "int")
        ]
    signatures += [
        call.new_signature({0: S(item.dim)}, S(item.dim), WRITE_BY_INDEX) for item in index.tensors
    ]
    if "accumulate" in call.params and call.get("accumulate", False):
        signatures += _accumulate_signatures(call, index, value)
    return signatures + _partial_write_signatures(call, by_tensors, value)


def _split_of_value(call: Call, index: Subscript, value: Any, place: int) -> dict[int, Sbp]:
    """Return {index of the operand ``value``: its split} if dim ``place`` of x[...] is split."""
    (size,) = (
        call.operands[0].shape[k] for k, position in index.out_dims.items() if position == place
    )
    return _split_of_value_at(index, value, place, size)


def _split_of_value_at(index: Subscript, value: Any, place: int, size: int) -> dict[int, Sbp]:
    """Return {index of the value's operand: its split} if x[...] is split at its dim ``place``.

    It is empty if the value is a number or broadcasts along that dim, so that every rank needs all
    of it. ``size`` is the size of the dim of x[...].
    """
    if not isinstance(value, Operand):
        return {}
    region = len(index.dims_after_ints) - len(index.tensors) + len(index.index_block[1])
    d = place - region + value.ndim
    return {value.index: S(d)} if d >= 0 and value.shape[d] == size else {}


def _accumulate_signatures(call: Call, index: Subscript, value: Any) -> list[Signature]:
    """Return the SBP signatures of index_put with ``accumulate`` with split indices and P of x.

    Each rank adds the values of its own indices to its addend of x.
    """
    signatures, (place, shape) = [], index.index_block
    for index_split in _index_split_signatures(call, index):
        dim = index_split.outs[0].dim  # type: ignore[attr-defined]
        ins = {i: entry for i, entry in enumerate(index_split.ins) if entry.is_split}
        ins |= _split_of_value_at(index, value, dim, shape[dim - place])
        signatures.append(call.new_signature({**ins, 0: P}, P))
    return signatures


def _partial_write_signatures(call: Call, by_tensors: bool, value: Any) -> list[Signature]:
    """Return the SBP signature with P of x and value: ``x[...] = value`` is linear in the two.

    It is left out if a position may be written twice without adding, as ranks could differ in which
    value is written last. ``by_tensors`` says whether index tensors select the positions.
    """
    accumulates = "accumulate" in call.params and call.get("accumulate", False)
    if isinstance(value, Operand):
        same_dtype = value.spec.dtype == call.operands[0].spec.dtype
        return (
            [call.new_signature({0: P, value.index: P}, P)]
            if same_dtype and (accumulates or not by_tensors)
            else []
        )
    return [call.new_signature({0: P}, P)] if isinstance(value, int) and value == 0 else []


def keeps_split_dim(call: Call, entry: Sbp) -> bool:
    """Return whether ``x[...]`` keeps every item of the dim that ``entry`` splits, in its order.

    Then any cut of the dim may stay. The answer is for the sizes of this call: ``0:n`` keeps all
    items of a dim of n.
    """
    if operand_and_mask(call) or not isinstance(entry, Split):
        return False
    return any(item.dim == entry.dim for item in subscript_of(call).of_kind("all"))


def takes_split_dims_whole(call: Call, ins: Sequence[NdSbp]) -> bool:
    """Return whether ``x[...]`` has ``:`` for each dim that ``ins`` splits.

    A plan of such a call may be used for all sizes. ``ins`` has the nd-sbp of each operand.
    """
    if len(call.operands) != 1:
        return False
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(isinstance(entry, list | bool) for entry in index):
        return False
    split_dims = {entry.dim for entry in ins[0] if isinstance(entry, Split)}
    x = call.operands[0]
    ellipsis_ndim = x.ndim - sum(entry is not None and entry is not Ellipsis for entry in index)
    dim = 0
    for entry in index:
        if entry is not None and entry is not Ellipsis:
            if dim in split_dims and entry != slice(None):
                return False
        dim += ellipsis_ndim if entry is Ellipsis else entry is not None
    return True


ROWS = (
    Row(
        "getitem", getitem, outs=masked_select_outs,
        moves=True, any_size=takes_split_dims_whole, numbers="*",
    ),
    Row("index", getitem, "input indices", outs=masked_select_outs, moves=True),
    Row("index_put", setitem, "input indices values accumulate"),
    # A split of the dim that the op acts on needs a form.
    Row(
        "narrow narrow_copy", getitem, "input dim start length",
        moves=True, any_size=True, numbers="start length",
    ),
    Row("select", getitem, "input dim index", moves=True, any_size=True, numbers="index"),
    Row("setitem", setitem),
    Row("slice", getitem, "input dim start end step", moves=True),
)  # fmt: skip

add_rows(ROWS)
