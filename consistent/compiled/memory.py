"""Table that maps the memory of a tensor to the value of a recorded program that is in it.

While a step is recorded, each tensor must be traced to the op that made it. Tensors are identified
by their memory, that is, by storage and geometry within it, not by Python objects, so that views,
aliases and tensors whose storage was replaced are distinguished correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Geometry = tuple
_DisableTorchFunction = torch._C.DisableTorchFunction
_T = torch.Tensor  # its methods give the shard of a global tensor; x.size() gives the whole


def storage_of(x: torch.Tensor) -> int:
    """Return a number that identifies the storage of ``x``, equal for all views of one storage."""
    with _DisableTorchFunction():
        return _T.untyped_storage(x)._cdata


def storage_bytes(x: torch.Tensor) -> int:
    """Return the size of the storage of ``x`` in bytes; 0 on ``meta``."""
    with _DisableTorchFunction():
        if not has_memory(x) or x.is_meta:
            return 0
        return _T.untyped_storage(x).nbytes()


def geometry(x: torch.Tensor) -> Geometry:
    """Return where ``x`` is in its storage: offset, size, strides, dtype, conj and neg bits."""
    with _DisableTorchFunction():
        return (
            _T.storage_offset(x),
            tuple(_T.size(x)),
            tuple(_T.stride(x)),
            x.dtype,
            _T.is_conj(x),
            _T.is_neg(x),
        )


def extent(where: Sequence[Any]) -> tuple[int, int]:
    """Return the range [begin, end) of elements of its storage that a tensor spans.

    ``where`` is its ``geometry``; offset, size and strides are used. Example: offset 2, size (2, 3)
    and strides (4, 1) span [2, 9).
    """
    offset, size, stride, *_ = where
    if 0 in size:
        return offset, offset
    return offset, offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def has_memory(x: torch.Tensor) -> bool:
    """Return whether ``x`` is strided and has storage."""
    with _DisableTorchFunction():
        return x.layout is torch.strided and not _T._is_zerotensor(x)


def is_contiguous(x: torch.Tensor) -> bool:
    """Return whether ``x`` is strided and contiguous."""
    with _DisableTorchFunction():
        return has_memory(x) and _T.is_contiguous(x)


class MemoryTable:
    """Table from the memory of a tensor to the recorded value that is in it, such as an fx node.

    A storage may be freed while it is in the table. A weak reference then keeps its number
    (``storage_of``) reserved, so that no later storage gets the same number.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[Geometry, Any]] = {}
        self._storage_refs: dict[int, StorageWeakRef] = {}
        self._values_by_id: dict[int, tuple[Any, torch.Tensor]] = {}

    def put(self, x: torch.Tensor, value: Any) -> None:
        """Record that the memory of ``x`` contains ``value`` from here on."""
        if not has_memory(x):
            # The tensor is kept too, so that its id is not reused.
            self._values_by_id[id(x)] = value, x
            return
        number = storage_of(x)
        if number not in self._storage_refs:
            with _DisableTorchFunction():
                self._storage_refs[number] = StorageWeakRef(_T.untyped_storage(x))
        self._values.setdefault(number, {})[geometry(x)] = value

    def find(self, x: torch.Tensor) -> Any:
        """Return the value in the memory of ``x``; None if there is none with its geometry."""
        if not has_memory(x):
            return self._values_by_id.get(id(x), (None, x))[0]
        return self._values.get(storage_of(x), {}).get(geometry(x))

    def base(self, x: torch.Tensor) -> Any:
        """Return a recorded value, of the dtype of ``x``, whose memory contains that of ``x``.

        The recorder then treats ``x`` as a view of it. Return None if there is no such value.
        """
        if not has_memory(x):
            return None
        begin, end = extent(geometry(x))
        for (*where, dtype, conj, neg), value in self._values.get(storage_of(x), {}).items():
            if dtype is x.dtype and not conj and not neg:
                first, last = extent(where)
                if first <= begin and end <= last:
                    return value
        return None
