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
    """``placement(type, ranks)``: the ranks that hold a tensor, and the grid that they form."""

    def __init__(self, type: str, ranks: Any, axes: Sequence[str] | None = None):  # noqa: A002
        config.world_size()  # starts torch.distributed, so that ranks are checked against the world
        super().__init__(type, ranks, axes)

    @classmethod
    def all(cls, type: str) -> Placement:  # noqa: A002, A003
        """Return the placement of all ranks of the world on one axis."""
        return Placement(type, range(config.world_size()))


def _plain_or_global(name: str) -> Callable[..., Any]:
    """Return the factory ``name``, such as ``zeros``, which makes a plain or a global tensor.

    The factory calls ``consistent.<name>`` if a placement or SBP is passed or a placement scope is
    entered, else ``torch.<name>``.
    """
    plain_factory, global_factory = getattr(torch, name), getattr(factories, name)

    @functools.wraps(global_factory)
    def make(
        *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
    ) -> Any:
        if placement is None and sbp is None and current_placement() is None:
            return plain_factory(*args, **options)
        return global_factory(*args, placement=placement, sbp=sbp, **options)

    return make


arange = _plain_or_global("arange")
"""``torch.arange``, or ``consistent.arange`` if a placement is passed or entered."""
empty = _plain_or_global("empty")
"""``torch.empty``, or ``consistent.empty`` if a placement is passed or entered."""
full = _plain_or_global("full")
"""``torch.full``, or ``consistent.full`` if a placement is passed or entered."""
ones = _plain_or_global("ones")
"""``torch.ones``, or ``consistent.ones`` if a placement is passed or entered."""
rand = _plain_or_global("rand")
"""``torch.rand``, or ``consistent.rand`` if a placement is passed or entered."""
randint = _plain_or_global("randint")
"""``torch.randint``, or ``consistent.randint`` if a placement is passed or entered."""
randn = _plain_or_global("randn")
"""``torch.randn``, or ``consistent.randn`` if a placement is passed or entered."""
zeros = _plain_or_global("zeros")
"""``torch.zeros``, or ``consistent.zeros`` if a placement is passed or entered."""


def to_global(
    x: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> GlobalTensor:
    """Return ``x`` as a global tensor on ``placement`` with layout ``sbp``.

    For a global ``x`` either may be left out, and stays as it is. A plain ``x`` is this rank's
    shard of the result, and needs both.
    """
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
    """Return ``x`` in another shape; one size may be -1."""
    return torch.reshape(x, tuple(shape))
