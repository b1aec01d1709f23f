"""Counts of writes to memory, kept while moved views (``moved_views``) are alive.

They show whether the source of a moved view was written since it was last read. Torch counts no
writes into inference tensors, and counts writes into ``x.data`` apart from writes into ``x``. So
writes are counted here by the storage that they reach. Code that compares two counts must hold the
storage meanwhile, so that no other storage reuses its address.
"""

from __future__ import annotations

from typing import Any

import torch

from ..plans.shards import HookOff

_write_counts: dict[int, int] = {}  # address of a storage -> number of writes


def count_write(x: Any) -> None:
    """Count a write into the memory of the global tensor ``x``.

    Called after each op that writes, while moved views are alive.
    """
    storage = storage_of(x)
    if storage is not None:
        _write_counts[storage._cdata] = _write_counts.get(storage._cdata, 0) + 1


def writes_of(x: Any) -> tuple[int, int]:
    """Return how often the memory of ``x`` was written, as (count of this module, torch's version).

    Two calls that return the same pair had no write in between. The first number includes writes by
    other tensors in the same memory.
    """
    storage = storage_of(x)
    writes = 0 if storage is None else _write_counts.get(storage._cdata, 0)
    if is_inference(x):
        return writes, 0
    with HookOff():
        return writes, x._version


def clear_counts() -> None:
    """Drop all counts; called when no moved view is left."""
    _write_counts.clear()


def storage_of(x: Any) -> Any:
    """Return the storage of the shard of ``x``, or None if ``x`` is sparse.

    Views of sparse tensors are never moved, so writes to these need no count.
    """
    with HookOff():  # reads the storage of x itself, since a plain alias would involve autograd
        return torch.Tensor.untyped_storage(x) if x.layout is torch.strided else None


def is_inference(x: Any) -> bool:
    """Return whether the shard of ``x`` was made in inference mode."""
    with HookOff():
        return x.is_inference()
