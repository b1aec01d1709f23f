"""Forms of indexing along a split dim: each rank handles the elements that it holds.

Reading gives this rank's part, with zeros where other ranks have the values, so the result is P.
Writing leaves out elements of other ranks. Empty parts go through the same ops as full ones,
because every rank must build the same autograd graph.
"""

from __future__ import annotations

from typing import Any

import torch

from ....rules.families.indexing.gather_scatter import READ_INDEX, WRITE_INDEX
from ....rules.layout.subscript import Item, Subscript, subscript_of
from ....rules.signature import Operand
from ....spec import intersect_runs, item_count
from ...refused import require_in_range
from ...registry import Shards, form

Tensor = torch.Tensor
_ALL = slice(None)


# -- x[...] ------------------------------------------------------------


@form("read_slice")
def read_slice(shard: Shards) -> Tensor:
    """Run x[index] on the shard.

    Elements that other ranks hold are zeros, so the result is P. Slices and ints are applied first,
    index tensors last.
    """
    index, x = subscript_of(shard.call), shard.tensors[0]
    inner, places = _shard_and_slice_index(shard, index)
    out = x[inner]
    sizes = [
        item.count if item.kind in ("slice", "int") else n
        for item, n in zip(index.items, out.shape, strict=True)
    ]
    if list(out.shape) != sizes:  # the rest of the slice is on other ranks
        part, out = out, x.new_zeros(sizes)
        out[places] = part
    out = out[tuple(0 if item.kind == "int" else _ALL for item in index.items)]
    return _apply_index_tensors(shard, index, out) if index.tensors else out


@form("read_parts")
def read_parts(shard: Shards) -> Tensor:
    """Run x[..., a:b] on a dim that is split part by part (``S(d, of=...)``).

    The slice selects whole parts, and the result is this rank's piece of each of them.
    """
    (item,) = subscript_of(shard.call).of_kind("slice")
    runs = shard.specs[0].runs(shard.coordinate)[item.dim]
    start = item_count(intersect_runs(runs, ((0, item.start),)))
    count = item_count(intersect_runs(runs, ((item.start, item.count),)))
    return shard.tensors[0].narrow(item.dim, start, count)


def _shard_and_slice_index(shard: Shards, index: Subscript) -> tuple[tuple, tuple]:
    """Return two indices of the elements of the slice that this rank holds.

    The first is into the shard, the second into the slice: ``slice[second] = shard[first]``. Both
    have one entry per item of the subscript; an int counts as a slice of one item.
    """
    starts, sizes = shard.region()
    inner: list[Any] = []
    places: list[Any] = []
    for item in index.items:
        shard_entry, slice_entry = _ALL, _ALL
        if item.kind in ("slice", "int"):
            shard_entry, slice_entry = item.slices_in_shard(starts[item.dim], sizes[item.dim])
        inner.append(None if item.kind == "new" else shard_entry)
        places.append(slice_entry)
    return tuple(inner), tuple(places)


def _apply_index_tensors(shard: Shards, index: Subscript, x: Tensor) -> Tensor:
    """Apply the index tensors of ``index`` to ``x``, to which the slices and ints were applied.

    Elements that other ranks hold give 0.
    """
    entries: list[Any] = [_ALL] * len(index.dims_after_ints)
    outside = None
    for position, item in enumerate(index.dims_after_ints):
        if item.kind != "tensor":
            continue
        entries[position] = _index_tensor(shard, item, x)
        if shard.region()[1][item.dim] != shard.specs[0].shape[item.dim]:
            x, entries[position], is_outside = _index_into_shard(
                shard, item.dim, entries[position], x, position
            )
            outside = is_outside if outside is None else outside | is_outside
    out = x[tuple(entries)]
    if outside is None:
        return out
    place, shape = index.index_block
    return out.masked_fill(_append_dims(outside, out.ndim - place - len(shape)), 0)


def _index_tensor(shard: Shards, item: Item, x: Tensor) -> Tensor:
    if isinstance(item.tensor, Operand):
        return shard.tensors[item.tensor.index]
    return torch.tensor(item.tensor, device=x.device)


def _append_dims(mask: Tensor, count: int) -> Tensor:
    """Append ``count`` dims of size 1 to ``mask``."""
    return mask.reshape(mask.shape + (1,) * count)


@form("write_slice")
def write_slice(shard: Shards) -> Tensor:
    """Run x[index] = value: each rank writes the part of the slice that is in its shard.

    Also ops such as slice_scatter, which return a copy of x with the slice replaced.
    """
    index, x = subscript_of(shard.call), shard.tensors[0]
    if shard.call.name == "setitem":
        value = shard.args[2]
    else:
        x, value = x.clone(), shard.get("src")
    inner, places = _shard_and_slice_index(shard, index)
    index_pairs = [
        (i, p) for i, p, item in zip(inner, places, index.items, strict=True) if item.kind != "new"
    ]
    target = tuple(i for i, _ in index_pairs)
    x[target] = (
        _part_of_value(value, index, x.shape, places) if isinstance(value, Tensor) else value
    )
    return x


@form("write_by_index")
def write_by_index(shard: Shards) -> Tensor:
    """Run x[index tensors] = value or index_put.

    Values for elements of other ranks go to a spare row, which is cut off after.
    """
    index, x = subscript_of(shard.call), shard.tensors[0]
    is_setitem = shard.call.name == "setitem"
    value = shard.args[2] if is_setitem else shard.get("values")
    out, entries = x, []
    for item in index.items:
        if item.kind == "tensor":
            entry = _index_tensor(shard, item, x)
            if shard.region()[1][item.dim] != shard.specs[0].shape[item.dim]:
                entry, outside = _local_index(shard, item.dim, entry)
                out = _append_zero_row(out, item.dim)
                entry = entry.masked_fill(outside, x.shape[item.dim])
            entries.append(entry)
        else:
            entries.append(_python_index(item))
    out = out.clone() if out is x else out
    if is_setitem:
        out[tuple(entries)] = value
    else:
        indices = [entry if isinstance(entry, Tensor) else None for entry in entries]
        torch.ops.aten.index_put_(out, indices, value, shard.get("accumulate", False))
    for d, n in enumerate(x.shape):  # cut the spare rows off
        out = out.narrow(d, 0, n)
    return x.copy_(out) if shard.call.inplace else out


def _python_index(item: Item) -> Any:
    """Return an item of the subscript as an entry of a Python index: an int, a slice or None.

    The item must not be an index tensor.
    """
    if item.kind == "new":
        return None
    if item.kind == "int":
        return item.start
    if item.kind == "all":
        return _ALL
    end = item.start + (item.count - 1) * item.step + 1 if item.count else item.start
    return slice(item.start, end, item.step)


def _part_of_value(
    value: Tensor, index: Subscript, shape: tuple[int, ...], places: tuple
) -> Tensor:
    """Broadcast ``value`` to the written slice, and return the part of it that this rank writes.

    ``places`` are the second indices of ``_shard_and_slice_index``, and ``shape`` is that of the
    shard. The part has a dim of size 1 for each int in the index, and no dim for a None.
    """
    sizes = {
        "all": lambda item: shape[item.dim],
        "slice": lambda item: item.count,
        "new": lambda item: 1,
    }
    region = [sizes[item.kind](item) for item in index.dims_after_ints]
    value = value[(0,) * (value.ndim - len(region))].expand(region)
    kinds = {"int": None, "new": 0}
    return value[
        tuple(kinds.get(item.kind, place) for item, place in zip(index.items, places, strict=True))
    ]


# -- index tensors -----------------------------------------------------


def _index_into_shard(
    shard: Shards, dim: int, index: Tensor, x: Tensor, x_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert ``index`` along a split dim to indices into this rank's shard.

    ``dim`` is a dim of the op's first operand. ``x`` is the shard of that operand, or computed from
    it, and has this dim at ``x_dim``.

    Returns:
        (x, the indices into the shard, mask of indices that point outside the shard). Those
            are replaced by 0. An empty shard gets one item of zeros, so that 0 is valid.
    """
    local, outside = _local_index(shard, dim, index)
    if x.shape[x_dim] == 0:
        x = _append_zero_row(x, x_dim)
    return x, local.masked_fill(outside, 0), outside


def _local_index(shard: Shards, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (``index`` counted from the start of this rank's shard, mask of those outside it).

    Raises as torch does for an index that the logical tensor lacks.
    """
    starts, sizes = shard.region()
    n = shard.specs[0].shape[dim]
    if shard.call.name == "take_along_dim":
        index = index.remainder(max(n, 1))  # as torch does
    # Check first: the masking by the callers would hide indices that torch rejects.
    require_in_range(index, n, shard.call.name, len(sizes))
    local = torch.where(index < 0, index + n, index) - starts[dim]
    return local, (local < 0) | (local >= sizes[dim])


def _append_zero_row(x: Tensor, dim: int) -> Tensor:
    """Append one row of zeros to ``x`` along ``dim``, for reads and writes of other ranks' rows."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def _index_operand(shard: Shards) -> int:
    operand = shard.call.get("index")
    assert isinstance(operand, Operand)
    return operand.index


@form(READ_INDEX)
def read_index(shard: Shards) -> Tensor:
    """Run index_select, gather or take_along_dim where the indexed dim is split.

    Elements that other ranks hold give 0, so the result is P.
    """
    operand, dim = _index_operand(shard), shard.call.dim("dim")
    x, index, outside = _index_into_shard(shard, dim, shard.tensors[operand], shard.tensors[0], dim)
    out = _run_with_tensors(shard, {0: x, operand: index})
    if shard.call.name == "index_select":
        outside = _append_dims(outside, out.ndim - dim - 1)
    return out.masked_fill(outside, 0)


@form(WRITE_INDEX)
def write_index(shard: Shards) -> Tensor:
    """Run scatter, index_add and similar ops where ``dim`` is split.

    Values for rows of other ranks go to a spare row, which is cut off after.
    """
    operand, dim, x = _index_operand(shard), shard.call.dim("dim"), shard.tensors[0]
    local, outside = _local_index(shard, dim, shard.tensors[operand])
    n = x.shape[dim]
    out = _run_with_tensors(
        shard, {0: _append_zero_row(x, dim), operand: local.masked_fill(outside, n)}
    ).narrow(dim, 0, n)
    return x.copy_(out) if shard.call.inplace else out


def _run_with_tensors(shard: Shards, replacements: dict[int, Tensor]) -> Any:
    """Run the op on the shards, with ``replacements`` (by operand index) for some tensors."""
    count = -1

    def replaced(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor):
            return value
        count += 1
        return replacements.get(count, value)

    args = [replaced(value) for value in shard.args]
    return shard.run(*args, **{name: replaced(value) for name, value in shard.kwargs.items()})
