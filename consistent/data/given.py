"""Make a DataLoader that reads this rank's share of each batch from the one that a user passes."""

from __future__ import annotations

import zlib
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..dispatch.plans.shards import is_global
from .collated import Collate
from .reading import ShareOfStream, ShareSampler, WorkerStart, as_it_is
from .share import Share


def check_given(loader: DataLoader) -> None:
    """Raise if ``loader`` cannot be divided among the ranks.

    Raises:
        TypeError: it has its own ``__iter__``, it divides the data among ranks already, or its data
            set contains global tensors.
    """
    kind: Any = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"data.loader: {kind.__name__} is a DataLoader with an iteration of its own, which "
            "would be left out. Give a torch.utils.data.DataLoader of the same data set."
        )
    batches: Any = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise TypeError(
                "data.loader: the DataLoader has a DistributedSampler, which gives each rank a "
                "share of the items, and the loader would divide that share again. Leave it out: "
                "DataLoader(dataset, batch_size=..., shuffle=True), with the batch size of all "
                "ranks together."
            )
    for name, value in getattr(loader.dataset, "__dict__", {}).items():
        held = value if isinstance(value, list | tuple) else (value,)
        if any(map(is_global, held)):
            raise TypeError(
                f"data.loader: the data set holds a global tensor in .{name}, and it is read "
                "item by item, on each rank others and perhaps in worker processes. Give it plain "
                "data: x.full() is a plain copy."
            )


def inner_loader(given: DataLoader, share: Share | None) -> DataLoader:
    """Return a DataLoader that reads this rank's part of each batch of ``given``.

    ``share`` is this rank's part of a batch; with None it reads whole batches. Data set, workers,
    pinning and generator are taken over from ``given``.
    """
    options: dict[str, Any] = {
        "num_workers": given.num_workers,
        "pin_memory": given.pin_memory,
        "timeout": given.timeout,
        "multiprocessing_context": given.multiprocessing_context,
        "generator": given.generator,
        "prefetch_factor": given.prefetch_factor,
        "persistent_workers": given.persistent_workers,
        "worker_init_fn": WorkerStart(given.worker_init_fn, share or Share()),
    }
    dataset: Any = given.dataset
    if isinstance(dataset, IterableDataset):
        if given.batch_size is not None:
            dataset = ShareOfStream(
                dataset, given.batch_size, given.drop_last, given.collate_fn, share or Share()
            )
            return DataLoader(dataset, batch_size=None, collate_fn=as_it_is, **options)
        return DataLoader(dataset, batch_size=None, collate_fn=given.collate_fn, **options)
    collate: Any = given.collate_fn
    if given.batch_sampler is None:
        indices: Any = ShareSampler(given.sampler, None)
        options |= {"batch_size": None, "sampler": indices}
    else:
        options["batch_sampler"] = ShareSampler(given.batch_sampler, share)
        if share is not None and share.cuts:
            collate = Collate(collate)
    return DataLoader(dataset, collate_fn=collate, **options)


def facts_of(loader: DataLoader) -> tuple[str, ...]:
    """Return what must be equal for the loaders of all ranks, as texts to compare.

    For example ``("50000 items", "batches of 64")``. A ``Subset`` adds a checksum of its indices.
    """
    dataset: Any = loader.dataset
    facts = [f"{_length(dataset)} items", f"batches of {loader.batch_size}"]
    if loader.drop_last:
        facts.append("without the last, short one")
    while isinstance(dataset, Subset):
        chosen = zlib.crc32(repr(list(dataset.indices)).encode())
        dataset = dataset.dataset
        facts.append(f"a Subset, checksum {chosen:#x}, of {_length(dataset)}")
    return tuple(facts)


def _length(dataset: Any) -> str:
    try:
        return str(len(dataset))
    except Exception:  # a stream has no length; an error on some ranks only shows as a difference
        return "uncounted"


def parts_are_alike(loader: DataLoader) -> bool:
    """Return whether batches need no comparison between ranks after the first ones.

    This holds for a ``TensorDataset`` with torch's own collate function, read in order without
    shuffling: no rank can then read other items or make other shapes than the rest.
    """
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", loader.sampler)
    return (
        type(dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and (batches is None or type(batches) is BatchSampler)
        and type(sampler) is SequentialSampler
        and sampler.data_source is loader.dataset
    )
