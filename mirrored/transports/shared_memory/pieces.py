"""Helpers that convert tensors to the bytes that ranks exchange through shared memory, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm import Shape
from ..torch_dist.messages import flat


def outputs(like: Tensor, shapes: Sequence[Shape], out: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the tensors to receive into: ``out``, or new ones.

    The ranks check with their headers whether ``out`` has the right sizes.
    """
    if out is None:
        return [torch.empty(tuple(s), dtype=like.dtype) for s in shapes]
    assert all(x.is_contiguous() for x in out), "out: the pieces must be contiguous"
    return list(out)


def joined(xs: Sequence[Tensor]) -> Tensor:
    """Return the bytes of several tensors in one tensor; return a single tensor unchanged."""
    if len(xs) == 1:
        return xs[0].detach()
    # The empty tensor is for `xs` without an element, which `torch.cat` does not accept.
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(flat(x.detach()) for x in xs)])


def bytes_with(x: Tensor, sizes: dict[int, int]) -> int:
    """Return how many bytes ``x`` would have if its dims had the ``sizes`` (dim -> size).

    With the sizes of the whole tensor, and not this rank's shard, the result is the same on all
    ranks.
    """
    shape = list(x.shape)
    for dim, size in sizes.items():
        shape[dim] = size
    return math.prod(shape) * x.element_size()
