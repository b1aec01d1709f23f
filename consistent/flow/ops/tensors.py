"""Factories of plain and global tensors, and the conversion from plain to global."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...spec import Placement, SbpLike
from ...tensor.global_tensor import GlobalTensor
from ...tensor.making import factories
from ...tensor.making.create import from_local
from .. import config
from ..scope import current_placement
from .micro_batches import op


class placement(Placement):  # noqa: N801  (the documents' name)
    """``placement(type, ranks)``: which ranks hold a tensor, in what grid."""

    def __init__(self, type: str, ranks: Any, axes: Sequence[str] | None = None):  # noqa: A002
        config.world_size()  # starts torch.distributed, so that ranks are checked against the world
        super().__init__(type, ranks, axes)

    @classmethod
    def all(cls, type: str) -> Placement:  # noqa: A002, A003
        """All ranks of the world on one axis."""
        return Placement(type, range(config.world_size()))


def _either(name: str) -> Callable[..., Any]:
    """torch's factory; with a placement, given or entered, the global one."""
    local, made_global = getattr(torch, name), getattr(factories, name)

    @functools.wraps(made_global)
    def make(
        *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
    ) -> Any:
        if placement is None and sbp is None and current_placement() is None:
            return local(*args, **options)
        return made_global(*args, placement=placement, sbp=sbp, **options)

    return make


arange = _either("arange")
"""``torch.arange``; with a placement, given or entered, ``consistent.arange``."""
empty = _either("empty")
"""``torch.empty``; with a placement, given or entered, ``consistent.empty``."""
full = _either("full")
"""``torch.full``; with a placement, given or entered, ``consistent.full``."""
ones = _either("ones")
"""``torch.ones``; with a placement, given or entered, ``consistent.ones``."""
rand = _either("rand")
"""``torch.rand``; with a placement, given or entered, ``consistent.rand``."""
randint = _either("randint")
"""``torch.randint``; with a placement, given or entered, ``consistent.randint``."""
randn = _either("randn")
"""``torch.randn``; with a placement, given or entered, ``consistent.randn``."""
zeros = _either("zeros")
"""``torch.zeros``; with a placement, given or entered, ``consistent.zeros``."""


def to_global(
    x: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor:
    """``x`` under another placement or SBP; a plain ``x`` is this rank's piece and needs both."""
    if isinstance(x, GlobalTensor):
        return x.to_global(placement=placement, sbp=sbp, **options)
    if placement is None or sbp is None:
        lacking = "placement" if placement is None else "sbp"
        raise TypeError(
            f"to_global: x is a plain tensor of shape {tuple(x.shape)}, and {lacking} is missing.\n"
            "  Nothing says how the ranks' pieces make up one tensor.\n"
            "  Write to_global(x, placement=..., sbp=...)."
        )
    return from_local(x, placement, sbp, **options)


@op
def reshape(x: Any, shape: Sequence[int]) -> Any:
    """``x`` in another shape; one size may be -1."""
    return torch.reshape(x, tuple(shape))
