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


def _either(name: str) -> Callable[..., Any]:
    """Return the factory ``name``, such as ``zeros``, which makes a plain or a global tensor.

    The factory calls ``consistent.<name>`` if a placement or SBP is passed or a placement scope is
    entered, else ``torch.<name>``.
    """
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
"""``torch.arange``, or ``consistent.arange`` if a placement is passed or entered."""
empty = _either("empty")
"""``torch.empty``, or ``consistent.empty`` if a placement is passed or entered."""
full = _either("full")
"""``torch.full``, or ``consistent.full`` if a placement is passed or entered."""
ones = _either("ones")
"""``torch.ones``, or ``consistent.ones`` if a placement is passed or entered."""
rand = _either("rand")
"""``torch.rand``, or ``consistent.rand`` if a placement is passed or entered."""
randint = _either("randint")
"""``torch.randint``, or ``consistent.randint`` if a placement is passed or entered."""
randn = _either("randn")
"""``torch.randn``, or ``consistent.randn`` if a placement is passed or entered."""
zeros = _either("zeros")
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
