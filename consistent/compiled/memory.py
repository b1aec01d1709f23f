"""Which value of a program lies in which memory.

A tensor is known by its memory: its storage and where it lies in it. So views, aliases and tensors
that were given other memory are told apart by what they are, and not by which Python object they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Geometry = tuple
_Off = torch._C.DisableTorchFunction
_T = torch.Tensor  # a global tensor answers for the whole; here its shard is meant


def storage_of(x: torch.Tensor) -> int:
    """A number for the memory of ``x``; the same for its views."""
    with _Off():
        return _T.untyped_storage(x)._cdata


def held_by(x: torch.Tensor) -> int:
    """The bytes of the memory of ``x``; none on ``meta``."""
    with _Off():
        if not has_memory(x) or x.is_meta:
            return 0
        return _T.untyped_storage(x).nbytes()


def geometry(x: torch.Tensor) -> Geometry:
    """Where ``x`` lies in its memory, without which memory it is."""
    with _Off():
        return (
            _T.storage_offset(x),
            tuple(_T.size(x)),
            tuple(_T.stride(x)),
            x.dtype,
            _T.is_conj(x),
            _T.is_neg(x),
        )


def extent(where: Sequence[Any]) -> tuple[int, int]:
    """The elements [begin, end) of its memory between which a geometry lies."""
    offset, size, stride, *_ = where
    if 0 in size:
        return offset, offset
    return offset, offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is strided, with memory of its own."""
    with _Off():
        return x.layout is torch.strided and not _T._is_zerotensor(x)


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether ``x`` is strided, and its elements lie in their order without gaps."""
    with _Off():
        return has_memory(x) and _T.is_contiguous(x)


class Memory:
    """Values by the memory that they lie in.

    Memory that is let go of is free for others; a weak reference keeps its number, so that none
    is used for a second one.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[Geometry, Any]] = {}
        self._numbers: dict[int, StorageWeakRef] = {}
        self._objects: dict[int, tuple[Any, torch.Tensor]] = {}

    def put(self, x: torch.Tensor, value: Any) -> None:
        """``x`` is ``value``."""
        if not has_memory(x):
            self._objects[id(x)] = value, x
            return
        number = storage_of(x)
        if number not in self._numbers:
            with _Off():
                self._numbers[number] = StorageWeakRef(_T.untyped_storage(x))
        self._values.setdefault(number, {})[geometry(x)] = value

    def find(self, x: torch.Tensor) -> Any:
        """The value that ``x`` is; None if no value lies there."""
        if not has_memory(x):
            return self._objects.get(id(x), (None, x))[0]
        return self._values.get(storage_of(x), {}).get(geometry(x))

    def base(self, x: torch.Tensor) -> Any:
        """A value of the same dtype that ``x`` is a part of; None if none is."""
        if not has_memory(x):
            return None
        begin, end = extent(geometry(x))
        for (*where, dtype, conj, neg), value in self._values.get(storage_of(x), {}).items():
            if dtype is x.dtype and not conj and not neg:
                first, last = extent(where)
                if first <= begin and end <= last:
                    return value
        return None
