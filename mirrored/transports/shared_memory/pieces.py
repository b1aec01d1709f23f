"""Helpers that convert tensors to the bytes that ranks exchange through shared memory, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm import Shape
from ..torch_dist.messages import as_bytes


def output_tensors(
    like: Tensor, shapes: Sequence[Shape], out: Sequence[Tensor] | None
) -> list[Tensor]:
    """Return the tensors to receive into: ``out``, or new ones of ``shapes`` and dtype of ``like``.

    The sizes of ``out`` are not checked here: the ranks compare them before anything is moved.
    """
    if out is None:
        return [torch.empty(tuple(s), dtype=like.dtype) for s in shapes]
    assert all(x.is_contiguous() for x in out), "out: the pieces must be contiguous"
    return list(out)


def concat_bytes(xs: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all ``xs`` in one 1-d tensor, or a single tensor as it is, detached."""
    if len(xs) == 1:
        return xs[0].detach()
    # The empty tensor is for `xs` without an element, which `torch.cat` does not accept.
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(as_bytes(x.detach()) for x in xs)])


def nbytes_with_sizes(x: Tensor, sizes: dict[int, int]) -> int:
    """Return how many bytes ``x`` would have if its dims had the ``sizes`` (dim -> size).

    Called with the sizes of the logical tensor, it gives the same number on all ranks, although
    their shards ``x`` differ: decisions by size must be the same on all.
    """
    shape = list(x.shape)
    for dim, size in sizes.items():
        shape[dim] = size
    return math.prod(shape) * x.element_size()
