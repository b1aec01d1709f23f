"""What stands between the brackets of ``x[...]``, dim by dim, and where each dim goes.

torch takes ints, slices and None first; index tensors then apply to what is left. Their common
shape is one block of dims, at the place of the first of them, or in front if others lie between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .signature import Call, Operand


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of an index, or one dim that it does not mention.

    kind is "all" (a dim as it is), "range" (start, count, step), "pick" (one int), "new" (None),
    "look" (an index tensor, or a list of ints). ``0:n`` is "all" too: torch clamps its bounds to a
    shard's size.
    """

    kind: str
    dim: int = -1
    start: int = 0
    count: int = 0
    step: int = 1
    look: Any = None

    def within(self, low: int, n: int) -> tuple[slice, slice]:
        """Of a shard with ``n`` items of the dim from ``low``: (which of its own, their places)."""
        first = max(0, -(-(low - self.start) // self.step))
        end = min(self.count, -(-(low + n - self.start) // self.step))
        if first >= end:
            return slice(0, 0), slice(0, 0)
        begin = self.start + first * self.step - low
        return slice(begin, begin + (end - first - 1) * self.step + 1, self.step), slice(first, end)


@dataclass(frozen=True)
class Index:
    """A parsed index. ``items`` in the order of the index, every dim mentioned once."""

    items: tuple[Item, ...]

    def of(self, *kinds: str) -> list[Item]:
        """Items of these kinds."""
        return [item for item in self.items if item.kind in kinds]

    @property
    def looks(self) -> list[Item]:
        """Index tensors."""
        return self.of("look")

    @cached_property
    def left(self) -> list[Item]:
        """The dims after ints, slices and None are applied."""
        return [item for item in self.items if item.kind != "pick"]

    @cached_property
    def block(self) -> tuple[int, tuple[int, ...]]:
        """(place, shape) of the dims that index tensors give; place 0 and shape () without them."""
        at = [i for i, item in enumerate(self.left) if item.kind == "look"]
        if not at:
            return 0, ()
        shape = torch.broadcast_shapes(*(look_shape(item.look) for item in self.looks))
        together = at[-1] - at[0] == len(at) - 1
        return at[0] if together else 0, tuple(shape)

    @cached_property
    def places(self) -> dict[int, int]:
        """{dim: its place in the output} of the dims that slices keep."""
        place, shape = self.block
        rest = [item for item in self.left if item.kind != "look"]
        after = range(len(rest) + len(shape))
        free = [p for p in after if not place <= p < place + len(shape)]
        return {
            item.dim: p for item, p in zip(rest, free, strict=True) if item.kind in ("all", "range")
        }


def look_shape(look: Any) -> tuple[int, ...]:
    """Shape of an index tensor or of a list of ints."""
    return tuple(look.shape) if isinstance(look, Operand | torch.Tensor) else (len(look),)


def index_of(call: Call) -> Index:
    """The call's index: that of ``x[...]``, or what select, narrow, slice say with other words."""
    if call.index is None:
        call.index = _read(call)
    return call.index


def _read(call: Call) -> Index:
    x = call.operands[0]
    if call.name in ("getitem", "setitem"):
        return parse(call.args[1], x.shape)
    if call.name in ("index", "index_put"):  # None stands for a dim as it is
        given = call.get("indices")
        return parse(tuple(slice(None) if entry is None else entry for entry in given), x.shape)
    dim = call.dim("dim", 0)
    if call.name in ("select", "select_scatter"):
        entry: Any = call.get("index")
    elif call.name in ("narrow", "narrow_copy"):
        start = call.get("start")
        start += x.shape[dim] if start < 0 else 0
        entry = slice(start, start + call.get("length"))
    else:
        entry = slice(call.get("start"), call.get("end"), call.get("step"))
    return parse((slice(None),) * dim + (entry,), x.shape)


def parse(index: Any, shape: Sequence[int]) -> Index:
    """Read an index into a tensor of ``shape``.

    Raises:
        TypeError: it holds what only the whole tensor can tell: masks, tensors as bounds, arrays.
        IndexError: an int is out of range, or there are too many.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    items: list[Item] = []
    dim = 0
    for entry in entries:
        if entry is None:
            items.append(Item("new"))
        elif entry is Ellipsis:
            rest = len(shape) - used
            items += [Item("all", d) for d in range(dim, dim + rest)]
            dim += rest
        else:
            items.append(_item(entry, dim, shape[dim]))
            dim += 1
    return Index(tuple(items))


def _item(entry: Any, dim: int, n: int) -> Item:
    if isinstance(entry, slice):
        bounds = (entry.start, entry.stop, entry.step)
        start, stop, step = slice(*(None if b is None else _int(b) for b in bounds)).indices(n)
        count = len(range(start, stop, step))
        if count == n and step == 1:
            return Item("all", dim)
        return Item("range", dim, start, count, step)
    if isinstance(entry, Operand):
        if entry.spec.dtype in (torch.bool, torch.uint8) or entry.ndim == 0:
            raise TypeError("a mask, or a number that only the data knows")
        return Item("look", dim, look=entry)
    if isinstance(entry, list):
        return Item("look", dim, look=[_int(value) for value in entry])
    at = _int(entry)
    if not -n <= at < n:
        raise IndexError(f"index {at} is out of range for dim {dim} of size {n}")
    return Item("pick", dim, at % n, 1)


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{type(value).__name__} is not an int")
    return int(value)
