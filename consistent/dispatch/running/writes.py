"""How often memory was written to, while there are moved views, which ask.

Torch counts no writes into inference tensors, and those into ``x.data`` apart from those into
``x``. So writes are counted here by the memory that they reach; whoever compares two counts holds
that memory, so that no other has its address meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch

from ..plans.shards import HookOff

_written: dict[int, int] = {}  # by the address of a storage


def wrote(x: Any) -> None:
    """Count a write into the global tensor ``x``."""
    reached = memory(x)
    if reached is not None:
        _written[reached._cdata] = _written.get(reached._cdata, 0) + 1


def count(x: Any) -> tuple[int, int]:
    """How often ``x``, or what shares its memory, was written to: as counted here, and by all that
    torch knows of."""
    reached = memory(x)
    counted = 0 if reached is None else _written.get(reached._cdata, 0)
    if is_inference(x):
        return counted, 0
    with HookOff():
        return counted, x._version


def forget() -> None:
    """Nobody asks any more."""
    _written.clear()


def memory(x: Any) -> Any:
    """The storage of the shard; None of a sparse one, of which no views are moved."""
    with HookOff():  # without a view, which autograd would be asked about
        return torch.Tensor.untyped_storage(x) if x.layout is torch.strided else None


def is_inference(x: Any) -> bool:
    """Whether the shard was made in inference mode."""
    with HookOff():
        return x.is_inference()
