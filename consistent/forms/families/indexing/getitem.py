"""Forms of indexing along a split dim: each rank handles the elements that it holds.

Reading gives this rank's part, with zeros where other ranks have the values, so the result is P.
Writing leaves out elements of other ranks. Empty parts go through the same ops as full ones,
because every rank must build the same autograd graph.
"""

from __future__ import annotations

from typing import Any

import torch

from ....rules.families.indexing.gather_scatter import READ, WRITE
from ....rules.layout.subscript import Item, Subscript, subscript_of
from ....rules.signature import Operand
from ....spec import items_in, overlapping
from ...refused import need_in_range
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
    inner, places = _selected(shard, index)
    out = x[inner]
    sizes = [
        item.count if item.kind in ("slice", "int") else n
        for item, n in zip(index.items, out.shape, strict=True)
    ]
    if list(out.shape) != sizes:  # the rest of the slice is on other ranks
        part, out = out, x.new_zeros(sizes)
        out[places] = part
    out = out[tuple(0 if item.kind == "int" else _ALL for item in index.items)]
    return _looked_up(shard, index, out) if index.tensors else out


@form("read_parts")
def read_parts(shard: Shards) -> Tensor:
    """Run x[..., a:b] on a dim that is split part by part (``S(d, of=...)``).

    The slice selects whole parts, and the result is this rank's piece of each of them.
    """
    (item,) = subscript_of(shard.call).of("slice")
    runs = shard.specs[0].runs(shard.coordinate)[item.dim]
    before = items_in(overlapping(runs, ((0, item.start),)))
    held = items_in(overlapping(runs, ((item.start, item.count),)))
    return shard.tensors[0].narrow(item.dim, before, held)


def _selected(shard: Shards, index: Subscript) -> tuple[tuple, tuple]:
    """Return two indices of the elements of the slice that this rank holds.

    The first is into the shard, the second into the slice: ``slice[second] = shard[first]``. Both
    have one entry per item of the subscript; an int counts as a slice of one item.
    """
    starts, sizes = shard.region()
    inner: list[Any] = []
    places: list[Any] = []
    for item in index.items:
        own, place = _ALL, _ALL
        if item.kind in ("slice", "int"):
            own, place = item.within(starts[item.dim], sizes[item.dim])
        inner.append(None if item.kind == "new" else own)
        places.append(place)
    return tuple(inner), tuple(places)


def _looked_up(shard: Shards, index: Subscript, x: Tensor) -> Tensor:
    """Apply the index tensors of ``index`` to ``x``, to which the slices and ints were applied.

    Elements that other ranks hold give 0.
    """
    entries: list[Any] = [_ALL] * len(index.left)
    outside = None
    for at, item in enumerate(index.left):
        if item.kind != "tensor":
            continue
        entries[at] = _index_tensor(shard, item, x)
        if shard.region()[1][item.dim] != shard.specs[0].shape[item.dim]:
            x, entries[at], missed = _shifted(shard, item.dim, entries[at], x, at)
            outside = missed if outside is None else outside | missed
    out = x[tuple(entries)]
    if outside is None:
        return out
    place, shape = index.block
    return out.masked_fill(_lined_up(outside, out.ndim - place - len(shape)), 0)


def _index_tensor(shard: Shards, item: Item, x: Tensor) -> Tensor:
    if isinstance(item.tensor, Operand):
        return shard.tensors[item.tensor.index]
    return torch.tensor(item.tensor, device=x.device)


def _lined_up(mask: Tensor, after: int) -> Tensor:
    """Append ``after`` dims of size 1 to ``mask``."""
    return mask.reshape(mask.shape + (1,) * after)


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
    inner, places = _selected(shard, index)
    kept = [
        (i, p) for i, p, item in zip(inner, places, index.items, strict=True) if item.kind != "new"
    ]
    target = tuple(i for i, _ in kept)
    x[target] = _part(value, index, x.shape, places) if isinstance(value, Tensor) else value
    return x


@form("write_by_index")
def write_by_index(shard: Shards) -> Tensor:
    """Run x[index tensors] = value or index_put.

    Values for elements of other ranks go to a spare row, which is cut off after.
    """
    index, x = subscript_of(shard.call), shard.tensors[0]
    sets = shard.call.name == "setitem"
    value = shard.args[2] if sets else shard.get("values")
    out, entries = x, []
    for item in index.items:
        if item.kind == "tensor":
            entry = _index_tensor(shard, item, x)
            if shard.region()[1][item.dim] != shard.specs[0].shape[item.dim]:
                entry, outside = _counted(shard, item.dim, entry)
                out = _with_spare(out, item.dim)
                entry = entry.masked_fill(outside, x.shape[item.dim])
            entries.append(entry)
        else:
            entries.append(_entry(item))
    out = out.clone() if out is x else out
    if sets:
        out[tuple(entries)] = value
    else:
        looks = [entry if isinstance(entry, Tensor) else None for entry in entries]
        torch.ops.aten.index_put_(out, looks, value, shard.get("accumulate", False))
    for d, n in enumerate(x.shape):  # cut the spare rows off
        out = out.narrow(d, 0, n)
    return x.copy_(out) if shard.call.inplace else out


def _entry(item: Item) -> Any:
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


def _part(value: Tensor, index: Subscript, shape: tuple[int, ...], places: tuple) -> Tensor:
    """Broadcast ``value`` to the written slice, and return the part of it that this rank writes.

    ``places`` are the second indices of ``_selected``, and ``shape`` is that of the shard. The part
    has a dim of size 1 for each int in the index, and no dim for a None.
    """
    sizes = {
        "all": lambda item: shape[item.dim],
        "slice": lambda item: item.count,
        "new": lambda item: 1,
    }
    region = [sizes[item.kind](item) for item in index.left]
    value = value[(0,) * (value.ndim - len(region))].expand(region)
    kinds = {"int": None, "new": 0}
    return value[
        tuple(kinds.get(item.kind, place) for item, place in zip(index.items, places, strict=True))
    ]


# -- index tensors -----------------------------------------------------


def _shifted(
    shard: Shards, dim: int, index: Tensor, x: Tensor, at: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert ``index`` along a split dim to indices into this rank's shard.

    ``dim`` is a dim of the op's first operand. ``x`` is the shard of that operand, or computed from
    it, and has this dim at ``at``.

    Returns:
        (x, the indices into the shard, mask of indices that point outside the shard). The latter
            are replaced by 0. An empty shard gets one item of zeros, so that 0 is valid.
    """
    local, outside = _counted(shard, dim, index)
    if x.shape[at] == 0:
        x = _with_spare(x, at)
    return x, local.masked_fill(outside, 0), outside


def _counted(shard: Shards, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (``index`` counted from the start of this rank's shard, mask of those outside it).

    Raises as torch does for an index that the logical tensor lacks.
    """
    starts, sizes = shard.region()
    n = shard.specs[0].shape[dim]
    if shard.call.name == "take_along_dim":
        index = index.remainder(max(n, 1))  # as torch does
    # Check first: the masking by the callers would hide indices that torch rejects.
    need_in_range(index, n, shard.call.name, len(sizes))
    local = torch.where(index < 0, index + n, index) - starts[dim]
    return local, (local < 0) | (local >= sizes[dim])


def _with_spare(x: Tensor, dim: int) -> Tensor:
    """Append one row of zeros to ``x`` along ``dim``, for reads and writes of other ranks' rows."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def _index_operand(shard: Shards) -> int:
    operand = shard.call.get("index")
    assert isinstance(operand, Operand)
    return operand.index


@form(READ)
def read_index(shard: Shards) -> Tensor:
    """Run index_select, gather or take_along_dim where the indexed dim is split.

    Elements that other ranks hold give 0, so the result is P.
    """
    at, dim = _index_operand(shard), shard.call.dim("dim")
    x, index, outside = _shifted(shard, dim, shard.tensors[at], shard.tensors[0], dim)
    out = _again(shard, {0: x, at: index})
    if shard.call.name == "index_select":
        outside = _lined_up(outside, out.ndim - dim - 1)
    return out.masked_fill(outside, 0)


@form(WRITE)
def write_index(shard: Shards) -> Tensor:
    """Run scatter, index_add and similar ops where ``dim`` is split.

    Values for rows of other ranks go to a spare row, which is cut off after.
    """
    at, dim, x = _index_operand(shard), shard.call.dim("dim"), shard.tensors[0]
    local, outside = _counted(shard, dim, shard.tensors[at])
    n = x.shape[dim]
    out = _again(shard, {0: _with_spare(x, dim), at: local.masked_fill(outside, n)}).narrow(
        dim, 0, n
    )
    return x.copy_(out) if shard.call.inplace else out


def _again(shard: Shards, by: dict[int, Tensor]) -> Any:
    """Run the op on the shards with some tensors replaced: those in ``by``, by operand index."""
    count = -1

    def one(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, Tensor):
            return value
        count += 1
        return by.get(count, value)

    args = [one(value) for value in shard.args]
    return shard.run(*args, **{name: one(value) for name, value in shard.kwargs.items()})
