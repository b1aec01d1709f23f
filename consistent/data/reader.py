"""Read this rank's part of an epoch, batch by batch, before ranks compare it (``BatchReader``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from .agreement import BatchNote
from .assemble import note_of
from .collated import Collated
from .reading import STRIDE, ItemCounts, ShareSampler, StreamPart, check_batch_boundary
from .share import Share

_NO_ITEMS = ItemCounts(0, None, 0)
Read = tuple[BatchNote, Collated, ItemCounts]


class BatchReader:
    """One pass of this rank over the DataLoader ``inner``, which reads its part of each batch.

    With each part comes a note, a summary for comparison with the other ranks' parts. An error
    while reading is returned as a note and not raised, because the other ranks wait for a note.
    ``share`` is this rank's part of a batch; None if it reads whole batches.
    """

    def __init__(self, inner: DataLoader, share: Share | None, epoch: int) -> None:
        self._inner = inner
        self._reads_whole = share is None
        self._random_stream: AbstractContextManager = nullcontext()
        sampler = inner.batch_sampler if inner.batch_sampler is not None else inner.sampler
        self._sampler = sampler if isinstance(sampler, ShareSampler) else None
        # Worker processes have random states of their own (WorkerInit).
        if inner.num_workers == 0 and share is not None and share.cuts:
            numbers = OwnRandomStream(share, epoch)
            self._random_stream = numbers
            if self._sampler is not None:
                self._sampler.drawing = numbers.main_stream
        self._batches: Iterator[Any] = iter(())
        self._prefetched: Read | None = None

    def start(self, skip: int) -> None:
        """Start workers, draw the order, skip ``skip`` items, and read the next batch."""
        if self._sampler is not None:
            self._sampler.skip = skip
        self._batches = iter(self._inner)
        self._prefetched = self._read_next()
        if self._sampler is None:  # a stream: skipped items must be read, too
            while skip > 0 and self._prefetched[0].kind == "batch":
                skip -= self._prefetched[2].count
                check_batch_boundary(-skip, 0)
                self._prefetched = self._read_next()

    def next(self) -> Read:
        """Return (note for the other ranks, this rank's part of the next batch, counts of items).

        The note's kind is "batch", "end" of the data, or "error"; only with "batch" is there a
        part.
        """
        prefetched, self._prefetched = self._prefetched, None
        return self._read_next() if prefetched is None else prefetched

    def _read_next(self) -> Read:
        try:
            with self._random_stream:
                batch = next(self._batches)
            if self._sampler is not None:
                # A queue, because with workers the sampler is ahead of the batches.
                counts = self._sampler.counts.popleft()
            elif isinstance(batch, StreamPart):
                batch, count, own = batch
                counts = ItemCounts(count, None if self._reads_whole else own, 0)
            else:
                counts = ItemCounts(1, None, 0)  # the stream makes batches: each counts as one item
            collated = batch if isinstance(batch, Collated) else Collated(batch, divided=False)
            return note_of(collated, counts), collated, counts
        except StopIteration:
            return BatchNote("end"), Collated(None), _NO_ITEMS
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return BatchNote("error", error=text, cause=error), Collated(None), _NO_ITEMS


class OwnRandomStream:
    """Context manager that gives reading in the main process a random stream of its own.

    Ranks read different items, and so draw different amounts of random numbers. If they drew from
    torch's default generator, the order of the next epoch would differ between ranks. So inside
    this context, while a batch is read, the default generator has the state of that separate
    stream.
    """

    def __init__(self, share: Share | None, epoch: int) -> None:
        index = 0 if share is None else share.index
        seed = torch.initial_seed() + (index + 1) * STRIDE + epoch
        self._other_state = torch.Generator().manual_seed(seed % 2**63).get_state()

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: Any) -> None:
        self._swap()

    @contextmanager
    def main_stream(self) -> Iterator[None]:
        """Context manager in which the default generator has the program's random stream.

        It is entered whenever the sampler draws indices, which must be the same on all ranks.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        current_state = torch.get_rng_state()
        torch.set_rng_state(self._other_state)
        self._other_state = current_state
