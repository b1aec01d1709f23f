"""Subscripts: parsed contents of the brackets of ``x[...]``, and where each dim of x goes.

Torch applies ints, slices and None first, then index tensors to the dims that are left. The common
shape of index tensors is one block of dims, at the place of the first of them, or in front if other
dims lie between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..signature import Call, DoesNotFit, Operand


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a subscript, or one dim of x that the subscript does not mention.

    Args:
        kind: "all" (``:``, the dim unchanged), "slice", "int", "new" (None), or "tensor" (an index
            tensor, or a list of ints). A slice of all items, such as ``0:n``, is "all".
        dim: the dim of x; -1 for "new".
        start, count, step: of a slice, its first item, the number of its items, and their distance.
            Of an int, ``start`` is the item.
        tensor: the index tensor or list.
    """

    kind: str
    dim: int = -1
    start: int = 0
    count: int = 0
    step: int = 1
    tensor: Any = None

    def slices_in_shard(self, low: int, n: int) -> tuple[slice, slice]:
        """Return (slice of the shard that is selected, slice of the result that it becomes).

        The shard has ``n`` items of the dim, from ``low`` on. ``x[1:8:2]`` of items 4 to 7 selects
        5 and 7: ``slice(1, 4, 2)`` of the shard, and ``slice(2, 4)`` of the result.
        """
        # Divisions round up: the first step at or after the start, or the end, of the shard.
        first = max(0, -(-(low - self.start) // self.step))
        end = min(self.count, -(-(low + n - self.start) // self.step))
        if first >= end:
            return slice(0, 0), slice(0, 0)
        begin = self.start + first * self.step - low
        return slice(begin, begin + (end - first - 1) * self.step + 1, self.step), slice(first, end)


@dataclass(frozen=True)
class Subscript:
    """Parsed contents of the brackets of ``x[...]``.

    ``items`` has the entries in order, with every dim of x once: ``...`` is one item for each dim.
    """

    items: tuple[Item, ...]

    def of_kind(self, *kinds: str) -> list[Item]:
        """Return the items whose kind is one of ``kinds``."""
        return [item for item in self.items if item.kind in kinds]

    @property
    def tensors(self) -> list[Item]:
        """Items that are index tensors."""
        return self.of_kind("tensor")

    @cached_property
    def dims_after_ints(self) -> list[Item]:
        """Items that are dims after ints, slices and None are applied: all but the ints.

        Index tensors are then applied to these dims.
        """
        return [item for item in self.items if item.kind != "int"]

    @cached_property
    def index_block(self) -> tuple[int, tuple[int, ...]]:
        """(position, shape) of the dims that index tensors give in the output; (0, ()) without.

        Their common shape is one block of dims, in place of the first of them, or in front if other
        dims lie between them: ``x[:, i, j]`` -> (1, shape of i + j), ``x[i, :, j]`` -> (0, ...).
        """
        positions = [i for i, item in enumerate(self.dims_after_ints) if item.kind == "tensor"]
        if not positions:
            return 0, ()
        shape = torch.broadcast_shapes(*(index_shape(item.tensor) for item in self.tensors))
        adjacent = positions[-1] - positions[0] == len(positions) - 1
        return positions[0] if adjacent else 0, tuple(shape)

    @cached_property
    def out_dims(self) -> dict[int, int]:
        """{dim of x: its position in the output} for the dims that slices or ``:`` keep.

        ``x[0, :, None, 1:3]`` gives ``{1: 0, 2: 2}``.
        """
        place, shape = self.index_block
        kept_items = [item for item in self.dims_after_ints if item.kind != "tensor"]
        output_dims = range(len(kept_items) + len(shape))
        free = [p for p in output_dims if not place <= p < place + len(shape)]
        return {
            item.dim: p
            for item, p in zip(kept_items, free, strict=True)
            if item.kind in ("all", "slice")
        }


def index_shape(index: Any) -> tuple[int, ...]:
    """Return the shape of an index tensor or of a list of ints."""
    return tuple(index.shape) if isinstance(index, Operand | torch.Tensor) else (len(index),)


def subscript_of(call: Call) -> Subscript:
    """Return the subscript of ``x[...]``, or the equivalent one of select, narrow and slice.

    ``select(x, 1, 0)`` is ``x[:, 0]``. It is kept in ``call.subscript``.
    """
    if call.subscript is None:
        call.subscript = _parse_call(call)
    return call.subscript


def _parse_call(call: Call) -> Subscript:
    x = call.operands[0]
    if call.name in ("getitem", "setitem"):
        return parse_subscript(call.args[1], x.shape)
    if call.name in ("index", "index_put"):  # None stands for a dim as it is
        indices = call.get("indices")
        return parse_subscript(
            tuple(slice(None) if entry is None else entry for entry in indices), x.shape
        )
    dim = call.dim("dim", 0)
    if call.name in ("select", "select_scatter"):
        entry: Any = call.get("index")
    elif call.name in ("narrow", "narrow_copy"):
        start, length = _as_int(call.get("start")), _as_int(call.get("length"))
        start += x.shape[dim] if start < 0 else 0
        entry = slice(start, start + length)
    else:
        entry = slice(call.get("start"), call.get("end"), call.get("step"))
    return parse_subscript((slice(None),) * dim + (entry,), x.shape)


def parse_subscript(index: Any, shape: Sequence[int]) -> Subscript:
    """Return the parsed subscript of a tensor of ``shape``.

    ``index`` is what stands in the brackets: ``(0, slice(1, 3))`` for ``x[0, 1:3]``.

    Raises:
        DoesNotFit: the subscript holds masks, tensors as bounds or arrays, whose values decide; or
            torch refuses it: an int is out of range, or there are too many entries.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    entry_count = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if entry_count > len(shape) or sum(entry is Ellipsis for entry in entries) > 1:
        raise DoesNotFit(f"{entry_count} entries for {len(shape)} dims")
    items: list[Item] = []
    dim = 0
    for entry in entries:
        if entry is None:
            items.append(Item("new"))
        elif entry is Ellipsis:
            unnamed_count = len(shape) - entry_count
            items += [Item("all", d) for d in range(dim, dim + unnamed_count)]
            dim += unnamed_count
        else:
            items.append(_parse_entry(entry, dim, shape[dim]))
            dim += 1
    return Subscript(tuple(items))


def _parse_entry(entry: Any, dim: int, n: int) -> Item:
    if isinstance(entry, slice):
        bounds = (entry.start, entry.stop, entry.step)
        bounded = slice(*(None if b is None else _as_int(b) for b in bounds))
        if bounded.step is not None and bounded.step < 1:
            raise DoesNotFit("torch takes steps from 1 on")
        start, stop, step = bounded.indices(n)
        count = len(range(start, stop, step))
        if count == n and step == 1:
            return Item("all", dim)
        return Item("slice", dim, start, count, step)
    if isinstance(entry, Operand):
        if entry.spec.dtype in (torch.bool, torch.uint8) or entry.ndim == 0:
            raise DoesNotFit("a mask, or a number that only the data gives")
        return Item("tensor", dim, tensor=entry)
    if isinstance(entry, list):
        return Item("tensor", dim, tensor=[_as_int(value) for value in entry])
    index = _as_int(entry)
    if not -n <= index < n:
        raise DoesNotFit(f"index {index} is out of range for dim {dim} of size {n}")
    return Item("int", dim, index % n, 1)


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise DoesNotFit(f"{type(value).__name__} is not an int")
    return int(value)
