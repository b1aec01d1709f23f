"""Make a whole batch from each rank's part: tensors become global, lists of texts are gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrored.every_rank import gather_from_ranks

from ..dispatch.plans.shards import is_global
from ..movement.check_mode import digest
from ..movement.recut import select_runs
from ..movement.world import device_of, my_coordinate
from ..spec import B, NdSbp, Placement, Split
from ..tensor.making.create import distribute, from_local
from .agreement import WHOLE, BatchNote, Field
from .collated import COUNT, OTHER, PER_ITEM, Collated, as_int, comparable_text
from .nested import Path, children, leaves, map_leaves, name_of
from .reading import ItemCounts
from .share import Share

# Path of a field -> its values for the whole batch; for lists and arrays with an entry per item.
Joined = Mapping[Path, Any]


def note_of(collated: Collated, counts: ItemCounts) -> BatchNote:
    """Return a summary of this rank's part of a batch, to be compared with the other ranks' notes.

    Args:
        collated: this rank's part, collated.
        counts: the numbers of items: ``count`` in the whole batch, ``own_count`` in this rank's
            part (None if this rank has read the whole batch).

    Raises:
        TypeError: the batch contains a global tensor.
        ValueError: the whole batch's value of a field does not follow from this rank's part.
    """
    values = leaves(collated.batch, lambda path, x: _is_field(collated, path, x))
    fields = tuple(_describe_field(collated, path, x, counts.own_count) for path, x in values)
    return BatchNote("batch", counts.order, counts.count, fields)


def value_hashes(collated: Collated) -> tuple[str, ...]:
    """Return a text for each field of ``collated``, equal on ranks that have equal values.

    Ranks that read the same items compare these texts.
    """
    values = leaves(collated.batch, lambda path, x: _is_field(collated, path, x))
    return tuple(digest(x) if isinstance(x, Tensor) else _value_text(x) for _, x in values)


def has_per_item_fields(note: BatchNote) -> bool:
    """Return whether the batch has a field such as a list of texts, one for each item.

    Ranks gather such fields (``BatchDistributor.gather_per_item_fields``), as they cannot become
    global tensors.
    """
    return any(field.kind.startswith("one for each item") for field in note.fields)


def _is_field(collated: Collated, path: Path, x: Any) -> bool:
    """Return whether the container ``x`` at ``path`` is one field, which is not traversed."""
    if collated.kinds:
        return path in collated.kinds
    return isinstance(x, list | tuple) and bool(x) and all(map(_is_plain, x))


def _is_plain(x: Any) -> bool:
    return children(x) is None and not isinstance(x, Tensor | np.ndarray)


def _value_text(x: Any) -> str:
    return (
        repr([comparable_text(each) for each in x])
        if isinstance(x, list | tuple)
        else comparable_text(x)
    )


def _describe_field(collated: Collated, path: Path, x: Any, own_count: int | None) -> Field:
    if is_global(x):
        raise TypeError(
            f"data.loader: {name_of(path)} is a global tensor already. A data set holds plain "
            "data, which may be read by worker processes: x.full() is a plain copy."
        )
    if own_count is None or not collated.divided:
        is_sized = isinstance(x, Tensor)
        if own_count is not None and is_sized:
            _check_item_count(path, x, own_count)
        kind = _dtype(x) if is_sized else type(x).__name__
        sizes = (
            tuple(x.shape)
            if is_sized and own_count is None
            else tuple(x.shape[1:])
            if is_sized
            else ()
        )
        return Field(path, kind, sizes, x.item() if is_sized and not x.ndim else None)
    return _describe_part_field(collated, path, x, max(own_count, 1))


def _describe_part_field(collated: Collated, path: Path, x: Any, own_count: int) -> Field:
    kind = collated.kinds.get(path)
    is_sized = isinstance(x, Tensor | np.ndarray) and x.ndim > 0
    if is_sized:
        _check_item_count(path, x, own_count, kind == OTHER)
    if kind == PER_ITEM or (kind is None and isinstance(x, Tensor) and is_sized):
        if isinstance(x, Tensor):
            return Field(path, _dtype(x), tuple(x.shape[1:]))
        if is_sized:
            dtype = x.dtype.kind if x.dtype.kind in "US" else x.dtype  # texts differ in length
            return Field(path, f"one for each item, {dtype}", tuple(x.shape[1:]))
        if isinstance(x, list | tuple) and len(x) == own_count:
            _check_no_tensors(path, x)
            return Field(path, "one for each item")
        kind = OTHER  # it had an entry for each item in the first batch, and has not here
    if kind is None:
        raise ValueError(
            f"data.loader: {name_of(path)} is {_short_repr(x)}, and of such a value the loader has "
            "to know whether there is one for each item, so that it can give that of the whole "
            "batch. It finds out by calling the collate function once more, with the items twice "
            f"over: {collated.unknown or 'this field was not in the first batch'}. Let every rank "
            f"collate the batch whole, {WHOLE}, or leave the field out."
        )
    if kind == OTHER or (kind == COUNT and as_int(x) != own_count):
        raise ValueError(
            f"data.loader: {name_of(path)} is {_short_repr(x)}, which the collate function makes "
            f"of this rank's part of the batch, {own_count} items, and neither is it the number of "
            "items nor are there entries for each, so that of the whole batch is not known. Let "
            f"every rank collate the batch whole, {WHOLE}, or compute it of what the loader gives."
        )
    if kind == COUNT:
        return Field(path, "the number of items")
    is_tensor = isinstance(x, Tensor)
    return Field(path, _dtype(x) if is_tensor else type(x).__name__, (), comparable_text(x))


def _check_item_count(path: Path, x: Any, own_count: int, not_per_item: bool = False) -> None:
    if not_per_item or (x.ndim and len(x) != max(own_count, 1)):
        raise ValueError(
            f"data.loader: {name_of(path)} has shape {tuple(x.shape)}, and this rank's part of "
            f"the batch are {max(own_count, 1)} items: dim 0 of a tensor counts the items, and "
            f"this one's does not. Let every rank collate the batch whole, {WHOLE}, or make a "
            "tensor with items along dim 0."
        )


def _check_no_tensors(path: Path, x: Any) -> None:
    if any(isinstance(each, Tensor) for _, each in leaves(x)):
        raise ValueError(
            f"data.loader: {name_of(path)} is a {type(x).__name__} with tensors for each item, and "
            "a global tensor is made of a tensor with items along dim 0. Stack or pad them in the "
            f"collate function, or let every rank collate the batch whole, {WHOLE}."
        )


def _dtype(x: Tensor) -> str:
    return str(x.dtype)


def _short_repr(x: Any) -> str:
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) < 40 else text[:36] + ' ...'}"


class BatchDistributor:
    """Converter of the tensors of a batch to global tensors on ``placement`` with SBP ``sbp``.

    For a tensor with too few dims, an entry that splits a dim that it lacks counts as B
    (replicated). ``coordinate`` is this rank's coordinate in the placement, or None outside it.
    """

    def __init__(self, placement: Placement, sbp: NdSbp) -> None:
        self.placement = placement
        self.sbp = sbp
        self.coordinate = my_coordinate(placement)

    def distribute_whole(self, batch: Any) -> Any:
        """Return ``batch``, which every rank has read whole, with its tensors made global.

        Each rank keeps only its shard of each tensor.
        """

        def make(_: Path, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return distribute(x, self.placement, self._sbp_for(x))

        return map_leaves(make, batch)

    def distribute_parts(self, collated: Collated, counts: ItemCounts, joined: Joined) -> Any:
        """Return the whole batch, of which this rank has read ``collated``, as global tensors.

        If a batch has fewer items than ranks, a rank without items has read one item all the same,
        to know the shapes. That item is dropped here.

        Args:
            collated: this rank's part of the batch, collated.
            counts: the numbers of items in the batch and in this rank's part.
            joined: the fields that ``gather_per_item_fields`` has gathered, which replace those of
                this rank's part.
        """

        def make(path: Path, x: Any) -> Any:
            if path in joined:
                return joined[path]
            if collated.kinds.get(path) == COUNT:
                x = _number_like(x, counts.count)
            if not isinstance(x, Tensor):
                return x
            return self._global_from_part(x[: counts.own_count] if x.ndim else x, counts.count)

        return map_leaves(make, collated.batch, lambda path, _: path in joined)

    def gather_per_item_fields(self, collated: Collated, own_count: int, share: Share) -> Joined:
        """Gather fields that have an entry for each item but are not tensors, such as texts.

        A collective of the world. Of the ranks that read the same items, the first one sends.

        Args:
            collated: this rank's part of the batch.
            own_count: the number of items in that part.
            share: which part of each batch this rank reads; it gives the order of the parts.

        Returns:
            For the path of each such field, its values for the whole batch.
        """
        own_fields = None
        # Of ranks that read the same items, the one at 0 on all axes that do not split dim 0 sends.
        if self.coordinate is not None and not any(self._unsplit_coordinates()):
            values = leaves(collated.batch, lambda path, _: path in collated.kinds)
            own_fields = (
                share.index,
                {
                    path: x[:own_count]
                    for path, x in values
                    if collated.kinds.get(path) == PER_ITEM and not isinstance(x, Tensor)
                },
            )
        received = gather_from_ranks(own_fields)
        parts = [part for _, part in sorted(filter(None, received), key=lambda each: each[0])]
        return {path: _concatenate([part[path] for part in parts]) for path in parts[0]}

    def _unsplit_coordinates(self) -> list[int]:
        """Return this rank's coordinates on the axes that do not split dim 0.

        Ranks that differ only in these coordinates read the same items. The first of such ranks
        has zeros only.
        """
        assert self.coordinate is not None
        return [
            index
            for index, entry in zip(self.coordinate, self.sbp, strict=True)
            if not (isinstance(entry, Split) and entry.dim == 0)
        ]

    def _sbp_for(self, x: Tensor) -> NdSbp:
        return tuple(B if isinstance(e, Split) and e.dim >= x.ndim else e for e in self.sbp)

    def _global_from_part(self, x: Tensor, count: int) -> Any:
        entries = self._sbp_for(x)
        shape = (count, *x.shape[1:]) if x.ndim else ()
        for axis, entry in enumerate(entries):
            # Dim 0 has only this rank's items already. Another split dim is still whole, and is cut
            # to this rank's shard here.
            if self.coordinate is not None and isinstance(entry, Split) and entry.dim > 0:
                parts = self.placement.shape[axis]
                runs = entry.runs(x.shape[entry.dim], parts, self.coordinate[axis])
                x = select_runs(x, entry.dim, runs)
        if self.coordinate is not None:
            x = x.contiguous().to(device_of(self.placement), non_blocking=True)
        else:
            x = torch.empty(0, dtype=x.dtype)
        return from_local(x, self.placement, entries, shape=shape)


def _concatenate(parts: list[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    items = [each for part in parts for each in part]
    return tuple(items) if isinstance(parts[0], tuple) else items


def _number_like(x: Any, number: int) -> Any:
    if isinstance(x, Tensor):
        return torch.full_like(x, number)
    if isinstance(x, np.ndarray):
        return np.full_like(x, number)
    return type(x)(number)
