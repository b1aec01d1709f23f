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
from .reading import ShareOfStream, ShareSampler, WorkerInit, identity
from .share import Share


def check_divisible(loader: DataLoader) -> None:
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
        values = value if isinstance(value, list | tuple) else (value,)
        if any(map(is_global, values)):
            raise TypeError(
                f"data.loader: the data set holds a global tensor in .{name}, and it is read "
                "item by item, on each rank others and perhaps in worker processes. Give it plain "
                "data: x.full() is a plain copy."
            )


def inner_loader(loader: DataLoader, share: Share | None) -> DataLoader:
    """Return a DataLoader that reads this rank's part of each batch of ``loader``.

    ``share`` is this rank's part of a batch; with None it reads whole batches. Data set, workers,
    pinning and generator are taken over from ``loader``.
    """
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "worker_init_fn": WorkerInit(loader.worker_init_fn, share or Share()),
    }
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        if loader.batch_size is not None:
            dataset = ShareOfStream(
                dataset, loader.batch_size, loader.drop_last, loader.collate_fn, share or Share()
            )
            return DataLoader(dataset, batch_size=None, collate_fn=identity, **options)
        return DataLoader(dataset, batch_size=None, collate_fn=loader.collate_fn, **options)
    collate: Any = loader.collate_fn
    if loader.batch_sampler is None:
        indices: Any = ShareSampler(loader.sampler, None)
        options |= {"batch_size": None, "sampler": indices}
    else:
        options["batch_sampler"] = ShareSampler(loader.batch_sampler, share)
        if share is not None and share.cuts:
            collate = Collate(collate)
    return DataLoader(dataset, collate_fn=collate, **options)


def facts_of(loader: DataLoader) -> tuple[str, ...]:
    """Return what must be equal for the loaders of all ranks, as texts to compare.

    For example ``("50000 items", "batches of 64")``. A ``Subset`` adds a checksum of its indices.
    """
    dataset: Any = loader.dataset
    facts = [f"{_length_text(dataset)} items", f"batches of {loader.batch_size}"]
    if loader.drop_last:
        facts.append("without the last, short one")
    while isinstance(dataset, Subset):
        checksum = zlib.crc32(repr(list(dataset.indices)).encode())
        dataset = dataset.dataset
        facts.append(f"a Subset, checksum {checksum:#x}, of {_length_text(dataset)}")
    return tuple(facts)


def _length_text(dataset: Any) -> str:
    try:
        return str(len(dataset))
    except Exception:  # a stream has no length; an error on some ranks only shows as a difference
        return "uncounted"


def can_skip_comparison(loader: DataLoader) -> bool:
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
