"""Gradients of gradients through rows and local forms equal plain torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from consistent import B, P, S
from tests.ranks import pool
from tests.twins import GRIDS, Laid, compare, randn

CLASSES = torch.tensor([0, 6, 2, 3, 1])


def attention(*given: Any) -> Any:
    """By torch's formula: its flash kernel for CPUs has no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*given)


# name: (function of the operands, shapes, SBPs of the operands)
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[Any]]] = {
    "conv1d, channels": (F.conv1d, [(2, 4, 7), (3, 4, 2)], [S(1), S(1)]),
    "conv1d, batch": (F.conv1d, [(4, 2, 7), (3, 2, 2)], [S(0), B]),
    "conv1d, space": (F.conv1d, [(2, 3, 9), (3, 3, 3)], [S(2), B]),
    "conv2d, space": (F.conv2d, [(1, 2, 8, 5), (2, 2, 3, 2)], [S(2), B]),
    "attention, sequence": (
        attention, [(2, 5, 4)] * 3, [S(1), S(1), S(1)],
    ),
    "attention, keys": (attention, [(2, 5, 4)] * 3, [B, S(1), S(1)]),
    "attention, batch": (attention, [(4, 3, 2)] * 3, [S(0)] * 3),
    "layer_norm, rows": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b, 0.1), [(4, 5), (5,), (5,)], [S(0), B, B],
    ),
    "layer_norm, columns": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b, 0.1), [(4, 5), (5,), (5,)], [S(1), S(0), S(0)],
    ),
    "rms_norm, columns": (
        lambda x, w: F.rms_norm(x, (5,), w, 0.1), [(4, 5), (5,)], [S(1), S(0)],
    ),
    "batch_norm": (
        lambda x, w: F.batch_norm(x, None, None, w, training=True, eps=0.1),
        [(5, 3), (3,)], [S(0), B],
    ),
    "group_norm": (lambda x: F.group_norm(x, 2, eps=0.1), [(2, 4, 5)], [S(1)]),
    "cross_entropy, rows": (lambda x: F.cross_entropy(x, CLASSES), [(5, 7)], [S(0)]),
    "cross_entropy, classes": (lambda x: F.cross_entropy(x, CLASSES), [(5, 7)], [S(1)]),
    "cross_entropy, smoothed": (
        lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1, reduction="none"),
        [(5, 7)], [S(1)],
    ),
    "log_softmax": (lambda x: F.log_softmax(x, 1), [(3, 7)], [S(1)]),
    "softmax": (lambda x: F.softmax(x, 1), [(3, 7)], [S(1)]),
    "logsumexp": (lambda x: x.logsumexp(0), [(5, 3)], [S(0)]),
    "var": (lambda x: x.var(0), [(5, 3)], [S(0)]),
    "norm": (lambda x: torch.linalg.vector_norm(x, 3, 0), [(5, 3)], [S(0)]),
    "prod": (lambda x: x.prod(0), [(5, 3)], [S(0)]),
    "cumsum": (lambda x: x.cumsum(0).square(), [(5, 3)], [S(0)]),
    "cumprod": (lambda x: x.cumprod(0), [(5, 3)], [S(0)]),
    "amax": (lambda x: x.amax(0) ** 3, [(5, 3)], [S(0)]),
    "sort": (lambda x: x.sort(0).values ** 3, [(5, 3)], [S(0)]),
    "topk": (lambda x: x.topk(1, 0).values ** 3, [(5, 3)], [S(0)]),
    "mse_loss": (F.mse_loss, [(5, 3), (5, 3)], [S(0), S(1)]),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, 0), [(5, 3)] * 2, [S(0), S(0)]),
    "linear, inner": (F.linear, [(4, 5), (3, 5), (3,)], [S(1), S(1), B]),
    "matmul of partials": (torch.matmul, [(4, 5), (5, 3)], [P, B]),
    "index": (lambda x: x[torch.tensor([0, 4, 4])] ** 3, [(5, 3)], [S(0)]),
    "index_add": (
        lambda x, y: x.index_add(0, torch.tensor([1, 1, 4]), y) ** 3,
        [(5, 2), (3, 2)], [S(0), S(0)],
    ),
    "gather": (lambda x: x.gather(0, CLASSES[None] % 5) ** 3, [(5, 5)], [S(0)]),
    "pooling": (lambda x: F.avg_pool1d(x, 2, 1) ** 3, [(2, 3, 7)], [S(2)]),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="linear") ** 3, [(2, 3, 4)], [S(2)],
    ),
    "fft": (lambda x: torch.fft.fft(x, dim=0).real ** 3, [(5, 3)], [S(0)]),
    "gelu of a partial": (F.gelu, [(4, 3)], [P]),
    "inverse": (lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3)), [(4, 3, 3)], [S(0)]),
}  # fmt: skip


def twice(at: Laid, name: str) -> Any:
    function, shapes, sbps = CASES[name]
    leaves = [
        at.leaf(randn(*shape, seed=i), sbp)
        for i, (shape, sbp) in enumerate(zip(shapes, sbps, strict=True))
    ]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return list(first), [x.grad for x in leaves]


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_the_gradient_equals_plain_torch(name: str) -> None:
    pool(3).run(compare, twice, GRIDS[3], name, timeout=30)
