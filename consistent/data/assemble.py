"""A rank's part of a batch becomes global tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch.plans.shards import is_global
from ..movement.check_mode import digest
from ..movement.world import device_of, my_coordinate
from ..spec import B, NdSbp, Placement, Split
from ..spec.tensor_spec import piece
from ..tensor.making.create import distribute, from_local
from .agreement import Note
from .nested import Path, mapped, name_of, tensors
from .reading import Drawn

Pad = Mapping[str, float] | float | None


def note_of(batch: Any, drawn: Drawn) -> Note:
    """What the other ranks must have read as well. ``drawn.own`` is None for a whole batch.

    Raises:
        TypeError: the batch holds a global tensor.
        ValueError: a tensor does not have the batch's items along dim 0.
    """
    fields = []
    for path, x in tensors(batch):
        if is_global(x):
            raise TypeError(
                f"data.loader: {name_of(path)} is a global tensor already. A data set holds plain "
                "data, which may be read by worker processes: x.full() is a plain copy."
            )
        if x.ndim and drawn.own is not None and len(x) != max(drawn.own, 1):
            raise ValueError(
                f"data.loader: {name_of(path)} has shape {tuple(x.shape)}, and this rank's part of "
                f"the batch are {max(drawn.own, 1)} items: dim 0 of a tensor counts the items. Let "
                "every rank collate the batch whole, loader(..., whole=True), or make a tensor "
                "with items along dim 0."
            )
        sizes = tuple(x.shape) if drawn.own is None else tuple(x.shape[1:])
        fields.append((path, str(x.dtype), sizes, None if x.ndim else x.item()))
    return Note("batch", drawn.order, drawn.count, tuple(fields))


def hashes(batch: Any) -> tuple[str, ...]:
    """A hash of the values of each tensor."""
    return tuple(digest(x) for _, x in tensors(batch))


def longest(notes: list[Note]) -> dict[Path, tuple[int, ...]]:
    """For each field the sizes that hold every rank's items."""
    found = {}
    for index, (path, _, _, _) in enumerate(notes[0].fields):
        found[path] = tuple(map(max, zip(*(note.fields[index][2] for note in notes))))
    return found


def padded(batch: Any, sizes: dict[Path, tuple[int, ...]], pad: Pad) -> Any:
    """The batch with each item's dims filled up to ``sizes``, at their ends."""

    def fill(path: Path, x: Tensor) -> Tensor:
        missing = [want - has for want, has in zip(sizes[path], x.shape[1:], strict=True)]
        if not any(missing):
            return x
        return F.pad(x, [n for m in reversed(missing) for n in (0, m)], value=_value(path, pad))

    return mapped(fill, batch)


def check_pad(notes: list[Note], pad: Pad) -> None:
    """Raise, on every rank, if a field must be padded and ``pad`` does not say with what."""
    for index, (path, _, _, _) in enumerate(notes[0].fields):
        if len({note.fields[index][2] for note in notes}) > 1:
            _value(path, pad)


def _value(path: Path, pad: Pad) -> float:
    if not isinstance(pad, Mapping):
        assert pad is not None
        return pad
    for key in reversed(path):
        if key in pad:
            return pad[key]
    raise ValueError(
        f"data.loader: the parts of {name_of(path)} are of different lengths, and "
        f"pad={dict(pad)} does not say what to pad it with. Add its key."
    )


class Layer:
    """Makes the tensors of a batch global on ``placement`` under ``sbp``, of which entries that a
    tensor has no dim for count as B."""

    def __init__(self, placement: Placement, sbp: NdSbp) -> None:
        self.placement = placement
        self.sbp = sbp
        self.at = my_coordinate(placement)

    def whole(self, batch: Any) -> Any:
        """Of a batch that every rank has whole."""
        return mapped(lambda _, x: distribute(x, self.placement, self._entries(x)), batch)

    def parts(self, batch: Any, count: int, own: int) -> Any:
        """Of a batch of ``count`` items, of which this rank has ``own`` (and reads one even if it
        has none)."""
        return mapped(lambda _, x: self._part(x[:own] if x.ndim else x, count), batch)

    def _entries(self, x: Tensor) -> NdSbp:
        return tuple(B if isinstance(e, Split) and e.dim >= x.ndim else e for e in self.sbp)

    def _part(self, x: Tensor, count: int) -> Any:
        entries = self._entries(x)
        shape = (count, *x.shape[1:]) if x.ndim else ()
        for axis, entry in enumerate(entries):
            if self.at is not None and isinstance(entry, Split) and entry.dim > 0:
                parts = self.placement.shape[axis]
                start, size = piece(x.shape[entry.dim], parts, self.at[axis])
                x = x.narrow(entry.dim, start, size)
        if self.at is not None:
            x = x.contiguous().to(device_of(self.placement), non_blocking=True)
        else:
            x = torch.empty(0, dtype=x.dtype)
        return from_local(x, self.placement, entries, shape=shape)
