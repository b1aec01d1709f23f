"""``flow.nn``: torch.nn under OneFlow's name, with the functional ops that jobs use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Module, Parameter

from mirrored.mirrored_tensor import MirroredTensor

from .. import step as graph
from ..spec import S
from ..step import Graph
from .ops.micro_batches import op
from .ops.padding import pad_same, pair

__all__ = [
    "Graph",
    "Module",
    "Parameter",
    "dropout",
    "graph",
    "max_pool2d",
    "relu",
    "softmax",
    "sparse_softmax_cross_entropy_with_logits",
]


@op
def relu(x: Any, name: str | None = None) -> Any:
    """Return max(x, 0)."""
    return F.relu(x)


@op
def softmax(logits: Any, axis: int = -1, name: str | None = None) -> Any:
    """Return the softmax over ``axis``."""
    return F.softmax(logits, axis)


@op
def max_pool2d(
    input: Any,  # noqa: A002  (the documents' name)
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str,
    name: str | None = None,
) -> Any:
    """Return the largest value of each window of ``ksize`` (2d max pooling).

    ``padding`` is "VALID" (none) or "SAME" (``ceil(n / stride)`` outputs).
    """
    kernel, stride = pair(ksize), pair(strides)
    x, pads = pad_same(input, padding, kernel, stride, value=float("-inf"))
    return F.max_pool2d(x, kernel, stride, pads)


@op
def dropout(x: Any, rate: float, name: str | None = None) -> Any:
    """Set elements to zero with probability ``rate``, and divide the rest by 1 - rate.

    Whether an element is dropped depends on its index in the logical tensor, and not on its rank.
    So the result is the same on any number of devices, and in the consistent and mirrored views.
    """
    if not isinstance(x, MirroredTensor):
        return F.dropout(x, rate)
    # Dropout draws the mask of a global tensor by logical position, so the parts are joined first.
    joined_shape = (x.shape[0] * len(x.ranks), *x.shape[1:])
    result: Any = F.dropout(x.to_global(S(0), shape=joined_shape, check=False), rate)
    return result.to_mirrored()


@op
def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> Any:
    """Return the cross-entropy of each sample.

    Shapes: labels [n], logits [n, classes] -> [n].
    """
    return F.cross_entropy(logits, labels.long(), reduction="none")


def __getattr__(name: str) -> Any:
    return getattr(torch.nn, name)
