"""Samplers, streams and worker setup by which a DataLoader reads this rank's share of each batch.

All of it may run in a worker process: it handles plain data, and never communicates.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from .collated import Collate
from .share import Share

# Distance between the seeds of two shares, so that ``seed + worker`` of two shares differ.
STRIDE = 1_000_003


class ItemCounts(NamedTuple):
    """Counts of the items of one batch.

    ``count`` is the number of its items over all ranks, ``own_count`` that of this rank's part
    (None if every rank reads the whole batch), and ``order`` a checksum of all its indices.
    """

    count: int
    own_count: int | None
    order: int


class ShareSampler:
    """Sampler that yields the indices of this rank's part of each batch of ``source``.

    ``source`` yields the indices of whole batches. For each, the counts are appended to ``counts``,
    from which the reader takes them when the batch arrives. Samplers run in the main process.
    """

    def __init__(self, source: Iterable, share: Share | None) -> None:
        self.source = source
        self.share = share  # None: the batch whole
        self.counts: deque[ItemCounts] = deque()
        self.skip = 0  # items to leave out at the start of the next epoch
        self.drawing: Callable[[], AbstractContextManager] = nullcontext

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        self.counts.clear()
        batches = skip_items(self.source, skip)
        while True:
            with self.drawing():  # a sampler draws its order from the main process's generator
                batch = next(batches, None)
            if batch is None:
                return
            order = zlib.crc32(repr(batch).encode())
            if self.share is None:
                self.counts.append(ItemCounts(_count(batch), None, order))
                yield batch
            else:
                indices, size = self.share.select(list(batch))
                self.counts.append(ItemCounts(len(batch), size, order))
                yield indices

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


def _count(batch: Any) -> int:
    """Return the number of items in ``batch``, which a sampler yielded.

    A data set that makes batches itself gets one index for each, which counts as one item.
    """
    return len(batch) if isinstance(batch, list | tuple) else 1


def skip_items(batches: Iterable, skip: int) -> Iterator[Any]:
    """Yield the batches of ``batches``, which are lists of indices, after the first ``skip`` items.

    Raises ValueError if the position is inside a batch. torch's own ``BatchSampler`` can divide the
    rest of the items again, so that there any position will do.
    """
    if not skip:
        yield from batches
    elif type(batches) is BatchSampler:  # skips single items: the batch size may have changed
        rest = islice(batches.sampler, skip, None)
        yield from BatchSampler(rest, batches.batch_size, batches.drop_last)  # type: ignore
    else:
        seen = 0
        for batch in batches:
            if seen >= skip:
                yield batch
            else:
                seen += _count(batch)
                check_batch_boundary(seen, skip)


def check_batch_boundary(seen: int, skip: int) -> None:
    """Raise ValueError if a saved position is inside a batch.

    The position is after ``skip`` items, and the batch that reaches it ends after ``seen`` items.
    """
    if seen > skip:
        raise ValueError(
            f"data.loader: the saved position is after {skip} items, and a batch ends after {seen} "
            "items: these batches are of another size than when the position was saved, and only "
            "the items of torch's own BatchSampler can be divided again.\n"
            "  Use the batch size of then, or start the epoch again without load_state_dict."
        )


class StreamPart(NamedTuple):
    """This rank's collated part of a batch of a stream.

    ``count`` is the number of items of the batch, ``own_count`` that of the part.
    """

    batch: Any
    count: int
    own_count: int


class ShareOfStream(IterableDataset):
    """Data set of this rank's parts of the batches of an ``IterableDataset``.

    Every rank reads the whole stream, because a stream has no indices to divide, and collates only
    its part of each batch.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list], Any],
        share: Share,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.collate = Collate(collate) if share.cuts else collate
        self.share = share

    def __iter__(self) -> Iterator[StreamPart]:
        items = iter(self.dataset)
        while batch := list(islice(items, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            own_items, size = self.share.select(batch)
            yield StreamPart(self.collate(own_items), len(batch), size)


def identity(x: Any) -> Any:
    """Return ``x``: the collate function for batches that are collated already."""
    return x


class WorkerInit:
    """``worker_init_fn`` that seeds a worker, and then calls the user's function.

    Ranks that read the same items draw the same numbers, other ranks do not. The user's function
    sees the user's data set in the worker info.
    """

    def __init__(self, user_init: Callable[[int], None] | None, share: Share) -> None:
        self.user_init = user_init
        self.seed_offset = share.index * STRIDE

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed = info.seed + self.seed_offset
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if isinstance(info.dataset, ShareOfStream):
            # WorkerInfo refuses assignment, and the user's function must see its own data set.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user_init is not None:
            self.user_init(worker)
