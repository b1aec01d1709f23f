"""Converts tensors that are sent in pieces to and from the form of the shared segment."""

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
    """Return the bytes of several tensors in one tensor; a single tensor is returned as it is."""
    if len(xs) == 1:
        return xs[0].detach()
    # The empty tensor is for `xs` without an element, which `torch.cat` does not accept.
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(flat(x.detach()) for x in xs)])


def bytes_with(x: Tensor, sizes: dict[int, int]) -> int:
    """Return the bytes of a tensor like ``x`` with ``sizes`` in some dims.

    With the whole tensor's sizes the result is the same on all ranks.
    """
    shape = list(x.shape)
    for dim, size in sizes.items():
        shape[dim] = size
    return math.prod(shape) * x.element_size()
