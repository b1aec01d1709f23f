"""Every order of every norm, over whole, split, partial and empty pieces, equals plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from consistent import B, P, Placement, S
from consistent.spec import Sbp
from tests.ranks import ALL, pool
from tests.twins import GRIDS, Laid, assert_same, randn

ORDERS = [0, 0.5, 1, 2, 3, math.inf, -math.inf, -1, -2, -0.5]
MATRIX_ORDERS = ["fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf]
SHAPES = [(5, 7), (1, 7), (0, 7), (5, 0)]


def vector_norms() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for i, order in enumerate(ORDERS):
        for j, dim in enumerate((None, 0, (0, 1))):
            for keepdim in (False, True):
                function = (i + j + keepdim) % 2 == 0
                if function or ALL:
                    yield (
                        f"vector_norm({order}, {dim}, {keepdim})",
                        lambda x, o=order, d=dim, k=keepdim: torch.linalg.vector_norm(x, o, d, k),
                    )
                if not function or ALL:
                    yield (
                        f"Tensor.norm({order}, {dim}, {keepdim})",
                        lambda x, o=order, d=dim, k=keepdim: x.norm(o, d, k),
                    )
        yield f"norm({order})", lambda x, o=order: torch.linalg.norm(x.flatten(), o)
        yield f"norm({order}, dim=1)", lambda x, o=order: torch.linalg.norm(x, o, dim=1)
    yield "norm()", lambda x: torch.linalg.norm(x)


def matrix_norms() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for order in MATRIX_ORDERS:
        yield f"matrix_norm({order})", lambda x, o=order: torch.linalg.matrix_norm(x, o)
        yield f"norm({order})", lambda x, o=order: torch.linalg.norm(x, o)
        yield f"norm({order}, dim)", lambda x, o=order: torch.linalg.norm(x, o, dim=(1, 0))


def run(at: Laid, norm: Callable[[Any], Any], shape: tuple, entry: Sbp) -> Any:
    """The norm and its gradient, or the kind of error."""
    x = at.leaf(randn(*shape), entry)
    try:
        made = norm(x)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__
    if not made.requires_grad:
        return made, torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(made.sum(), [x], allow_unused=True)
    return made, torch.zeros_like(x) if gradient is None else gradient


def compare_all(rank: int, ranks: Any, norms: Callable[[], Any], shape: tuple) -> list[str]:
    """What differs from plain torch."""
    placement, wrong = Placement("cpu", ranks), []
    # Of empty pieces every second norm, in turn: each order has several.
    at = SHAPES.index(shape)
    for name, norm in list(norms())[at % 2 :: 2] if at and not ALL else norms():
        wanted = run(Laid(None), norm, shape, B)
        for entry in (B, S(0), S(1), P):
            try:
                assert_same(run(Laid(placement), norm, shape, entry), wanted)
            except AssertionError as error:
                wrong.append(f"{name} of {shape} {entry}: {error}")
    return wrong


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norms", [vector_norms, matrix_norms], ids=lambda f: f.__name__)
def test_norms_of_every_order(norms: Callable, shape: tuple) -> None:
    for wrong in pool(3).run(compare_all, GRIDS[3], norms, shape, timeout=300):
        assert not wrong, "\n".join(wrong[:20])
