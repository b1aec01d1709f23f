"""A DataLoader whose batches are global tensors; each rank reads its own part (``loader``)."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..movement import plain_values
from ..spec import B, NdSbp, Placement, S, SbpLike, Split, as_nd_sbp
from ..tensor.making.create import check_world
from . import agreement
from .agreement import BatchNote
from .assemble import BatchDistributor, has_per_item_fields, value_hashes
from .collated import Collated
from .given import can_skip_comparison, check_divisible, facts_of, inner_loader
from .order import Order, set_epoch
from .padding import Pad, check_padding, longest_sizes, pad_batch, padding_of
from .reader import BatchReader
from .reading import ItemCounts
from .share import Share


def loader(
    data: Any,
    placement: Placement,
    sbp: SbpLike | None = None,
    *,
    whole: bool = False,
    pad: Pad = None,
    seed: int = 0,
    check: bool | None = None,
    **options: Any,
) -> Loader:
    """Return the batches that a DataLoader of one process would give, as global tensors.

    Each rank reads and collates its own items only.

    ```
    batches = consistent.data.loader(DataLoader(dataset, batch_size=64, shuffle=True), placement)
    for images, labels in batches:      # images: f32[64, 3, 32, 32] S(0)
        loss = F.cross_entropy(model(images), labels)
    ```

    Args:
        data: a ``DataLoader``, whose data set, batches, collate function, workers, generator and
            pinning are taken over; or a data set, for which one is made with ``options``.
            ``batch_size`` counts the items of all ranks together.
        placement: the placement of the batches.
        sbp: the layout (SBP) of their tensors, one entry for each axis: S(d), split along dim d
            counted from the front, or B, replicated. An entry for a dim that a tensor does not have
            counts as B. By default S(0) on the first axis and B on the others. Ranks along an axis
            that does not split dim 0 read the same items.
        whole: every rank reads and collates the whole batch, and keeps its part of the tensors. For
            a collate function that looks at all items, such as one that pads to the longest.
        pad: the value that fills up tensors whose items are shorter than those of other ranks: a
            number, or one for each key of the batch. Keys that it lacks, and the side, are taken
            from a tokenizer of transformers in the collate function, if there is one. With neither,
            a batch that needs padding raises.
        seed: seed of the order, if ``data`` is a data set and ``options`` has no generator.
        check: whether ranks compare each batch that they have read, sending 8 bytes a batch; by
            default, unless the types of data set and sampler guarantee that they agree. Unless
            ``check`` is ``False``, they also compare the number of items when the loader is made,
            and in the first batches a hash of the values that several ranks read.
        options: arguments of ``DataLoader``, if ``data`` is a data set.

    Returns:
        Batches with ``len``, ``state_dict`` and ``load_state_dict``. Everything in a batch is that
        of the whole batch: tensors are global, a list or array with an entry for each item (texts)
        is the whole batch's on every rank, and so is the number of items. Any other value that
        depends on the items, such as a sum over them, raises. To find out which value is of which
        kind, the collate function is called a second time for the first batch, with the items twice
        over.

    Raises:
        TypeError, ValueError: ``data`` or ``sbp`` cannot be used, or the ranks have data sets of
            different lengths.
    """
    check_world("data.loader", placement)
    if not isinstance(data, DataLoader):
        if not isinstance(data, IterableDataset):
            options.setdefault("generator", torch.Generator().manual_seed(seed))
        data = DataLoader(data, **options)
    elif options:
        raise TypeError(
            f"data.loader: {', '.join(sorted(options))} cannot be changed in a DataLoader that is "
            "made already. Give the data set, loader(dataset, placement, batch_size=...), or make "
            "the DataLoader with them."
        )
    check_divisible(data)
    return Loader(data, placement, _batch_sbp(sbp, placement), whole, pad, check)


def _batch_sbp(sbp: SbpLike | None, placement: Placement) -> NdSbp:
    entries = (S(0), *(B,) * (placement.ndim - 1)) if sbp is None else as_nd_sbp(sbp)
    if len(entries) != placement.ndim:
        raise ValueError(
            f"data.loader: sbp={entries} has {len(entries)} entries, and {placement} has "
            f"{placement.ndim} axes. Give one SBP per axis."
        )
    for entry in entries:
        if entry.is_partial or (isinstance(entry, Split) and entry.dim < 0):
            raise ValueError(
                f"data.loader: sbp={entries} holds {entry}, and a batch is read in pieces, S(d) "
                "with d counted from the front because its tensors differ in their number of "
                "dims, or whole, B."
            )
        if isinstance(entry, Split) and entry.dim == 0 and entry.cut is not None:
            raise ValueError(
                f"data.loader: sbp={entries} cuts dim 0 as {entry}, and a rank reads one run of "
                "the items. Write S(0), and box the batch: x.to_global(sbp=...)."
            )
    return entries


class Loader:
    """Iterable over batches of global tensors, made by ``loader``; each iteration is one epoch.

    Attributes:
        epoch: number of epochs that are over.
        stopped: whether the last iteration ended because a rank was asked to stop.
        loader: the DataLoader that was passed.
    """

    def __init__(
        self,
        given: DataLoader,
        placement: Placement,
        sbp: NdSbp,
        whole: bool,
        pad: Pad,
        check: bool | None,
    ) -> None:
        self.loader = given
        self.placement = placement
        self.epoch = 0
        self.stopped = False
        self._stop_requested = False
        self._distributor = BatchDistributor(placement, sbp)
        self._padding = padding_of(given.collate_fn, pad)
        # A rank outside the placement reads what the first rank reads, to know the shapes.
        coordinate = self._distributor.coordinate or (0,) * placement.ndim
        whole = whole or (given.batch_sampler is None and given.batch_size is None)
        self._share = None if whole else Share.for_coordinate(coordinate, placement, sbp)
        self._inner_loader = inner_loader(given, self._share)
        self._order = Order(given)
        self._compares_batches = not can_skip_comparison(given) if check is None else check
        # Number of further batches whose values are compared; the same on every rank.
        self._checks_left = 0 if check is False else plain_values.CHECKED_CALLS
        if check is not False:
            agreement.check_same_data(facts_of(given))
        self._item_count = 0  # given in this epoch so far, over all ranks
        self._is_resumed = False

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the DataLoader, such as ``dataset`` or ``batch_size``."""
        if name == "loader":  # not set yet, as during unpickling: avoids endless recursion
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, from which any number of ranks can continue.

        It has the epoch, the number of its items given so far over all ranks, and the states of the
        generators that draw its order. It is the same on every rank.
        """
        order = self._order.state(began=self._item_count > 0)
        return {"epoch": self.epoch, "items": self._item_count, "order": order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after ``state``: the next iteration gives the rest of its epoch."""
        self.epoch, self._item_count = int(state["epoch"]), int(state["items"])
        self._is_resumed = self._item_count > 0
        self._order.load(state["order"], began=self._is_resumed)

    def stop_on(self, *signals: int) -> None:
        """End the iteration on all ranks, before the same batch, once a rank receives a signal.

        Then ``stopped`` is true, and ``state_dict`` has the position for the next run to continue.

        ```
        batches.stop_on(signal.SIGTERM)
        for batch in batches:
            ...
        if batches.stopped:
            consistent.checkpoint.save(folder, model=model, optimizer=optimizer, loader=batches)
        ```

        This takes no extra message: ranks learn of the signal when they compare a batch.
        """
        self._compares_batches = True
        for number in signals:
            signal.signal(number, self._note_signal)

    def _note_signal(self, *_: Any) -> None:
        self._stop_requested = True

    def set_epoch(self, epoch: int) -> None:
        """Start epoch number ``epoch`` with the next iteration.

        Samplers that have a ``set_epoch`` method are given the number. It does not change the order
        of other samplers, which comes from their random generators.
        """
        self.epoch, self._item_count, self._is_resumed = epoch, 0, False
        set_epoch(self.loader, epoch)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._is_resumed = self._is_resumed, False
        if not resumed:
            # An epoch whose iteration was left early counts as over.
            self.epoch += self._item_count > 0
            self._item_count = 0
        set_epoch(self.loader, self.epoch)
        reader = BatchReader(self._inner_loader, self._share, self.epoch)
        with self._order.drawing(resumed=resumed):
            reader.start(skip=self._item_count)
        while (batch := self._next_batch(*reader.next())) is not None:
            yield batch
        if not self.stopped:
            self.epoch, self._item_count = self.epoch + 1, 0

    def _next_batch(self, note: BatchNote, part: Collated, counts: ItemCounts) -> Any:
        """Return the next batch as global tensors, after a comparison with the other ranks.

        Returns None at the end of the data or after a stop. The arguments are what
        ``BatchReader.next`` returns.

        Args:
            note: a summary of this rank's part of the batch, which is compared with those of the
                other ranks.
            part: this rank's part of the batch.
            counts: the number of items of the batch and of this rank's part.
        """
        note = replace(note, stop=self._stop_requested)
        is_early, self._checks_left = self._checks_left > 0, max(self._checks_left - 1, 0)
        if is_early and plain_values.are_compared():
            note = replace(note, **self._value_hashes(part))
        notes = agreement.gather_if_different(note) if self._compares_batches or is_early else None
        self.stopped = any(each.stop for each in notes or [note])
        # Raised after the ranks have exchanged notes, so that the other ranks raise as well.
        if note.cause is not None:
            raise note.cause
        if self.stopped:
            self._stop_requested, self._is_resumed = False, self._item_count > 0
            return None
        if notes is not None:
            part = self._check_and_pad(notes, part, counts)
        if note.kind == "end":
            return None
        self._item_count += counts.count
        if counts.own_count is None:
            return self._distributor.distribute_whole(part.batch)
        # All ranks' parts have the same fields, so either all ranks take part in gathering or none.
        joined = (
            self._distributor.gather_per_item_fields(part, counts.own_count, self._share or Share())
            if has_per_item_fields(note)
            else {}
        )
        return self._distributor.distribute_parts(part, counts, joined)

    def _check_and_pad(
        self, notes: list[BatchNote], part: Collated, counts: ItemCounts
    ) -> Collated:
        """Check that the parts of all ranks fit together, and pad this rank's part to the longest.

        Args:
            notes: the summary of each rank's part.
            part: this rank's part, which is returned, padded if necessary.
            counts: the number of items of the batch and of this rank's part.
        """
        padding = None if counts.own_count is None else self._padding
        agreement.check_notes(notes, sizes_may_differ=padding is not None)
        if padding is None:
            return part
        check_padding(notes, padding)
        return part._replace(batch=pad_batch(part.batch, longest_sizes(notes), padding))

    def _value_hashes(self, part: Collated) -> dict[str, Any]:
        """Return the fields ``share`` and ``values`` of the ``BatchNote`` of the first batches.

        By these, ranks that read the same items check that they read the same values. ``values`` is
        empty if each rank of the placement reads other items, or if this rank is outside it.
        """
        layer, share = self._distributor, self._share or Share()
        has_copies = math.prod(parts for parts, _ in share.cuts) < layer.placement.size
        compares_values = layer.coordinate is not None and has_copies
        return {"share": share.index, "values": value_hashes(part) if compares_values else ()}
