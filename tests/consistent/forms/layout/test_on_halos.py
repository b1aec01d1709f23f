"""Ops along a split dim, called as users call them: value and gradient are those of one device, the
split stays, and no rank sends more than what its neighbours lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consistent import B, Placement, S, distribute
from consistent.movement.plain_values import plain_may_differ
from consistent.spec import Sbp
from mirrored.transports.counting import counting
from tests.ranks import ON_ONE_AXIS, pool

Shape = tuple[int, ...]
LAST = torch.tensor([6, 0, 3])


def _set(x: Any, value: Any) -> Any:
    y = x * 1
    y[LAST] = value
    y[1:5] = 0.0
    return y


def _put(x: Any, value: Any) -> Any:
    return x.index_put((LAST,), value, accumulate=True)


# Shapes, where they lie, the op, where its result lies, and how much of the largest input the
# busiest rank may send.
CASES: dict[str, tuple[tuple[Shape, ...], tuple[Sbp, ...], Callable[..., Any], Sbp, float]] = {
    "cache grows": (
        ((2, 7, 3), (2, 2, 3)), (S(1), B), lambda x, y: torch.cat((x, y), 1), S(1), 0.3
    ),
    "cat": (((7, 3), (8, 3)), (S(0), S(0)), lambda x, y: torch.cat((x, y)), S(0), 1.0),
    "cat of vectors": (((7,), (8,)), (S(0), S(0)), lambda x, y: torch.cat((x, y)), S(0), 1.0),
    "fused projections": (((9, 12),), (S(1),), lambda x: sum(x.chunk(3, -1)), S(1), 0.4),
    "split": (((11,),), (S(0),), lambda x: x.split(4)[1], S(0), 0.4),
    "view merges": (((7, 5, 3),), (S(0),), lambda x: x.view(-1, 3), S(0), 0.2),
    "view parts": (((35, 3),), (S(0),), lambda x: x.view(7, 5, 3), S(0), 0.2),
    "repeat": (((7, 3),), (S(0),), lambda x: x.repeat(2, 1), S(0), 1.0),
    "reflect": (((2, 9, 8),), (S(1),), lambda x: F.pad(x, (1, 1, 2, 2), "reflect"), S(1), 0.4),
    "circular": (((2, 2, 9, 8),), (S(2),), lambda x: F.pad(x, (1, 1, 2, 2), "circular"), S(2), 0.4),
    "pool with places": (
        ((2, 2, 9, 8),), (S(2),), lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0],
        S(2), 0.3,
    ),
    "partial windows": (
        ((2, 2, 9, 8),), (S(2),), lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), S(2), 0.3
    ),
    "area": (
        ((2, 2, 12, 8),), (S(2),), lambda x: F.interpolate(x, (6, 4), mode="area"), S(2), 0.1
    ),
    "bicubic": (
        ((2, 2, 9, 8),), (S(2),), lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        S(2), 0.6,
    ),
    "patches": (((2, 2, 12, 8),), (S(2),), lambda x: F.unfold(x, 4, stride=4), S(2), 0.2),
    "folded": (((2, 32, 6),), (S(2),), lambda x: F.fold(x, (12, 8), 4, stride=4), S(2), 0.4),
    "written": (((7, 3), (3, 3)), (S(0), B), _set, S(0), 0.0),
    "put": (((7, 3), (3, 3)), (S(0), B), _put, S(0), 0.0),
    "row replaced": (((7, 3), (3,)), (S(0), B), lambda x, y: x.select_scatter(y, 0, 4), S(0), 0.0),
    "shifted": (((7, 3),), (S(0),), torch.fft.fftshift, S(0), 1.0),
    "solved": (((7, 3, 3), (7, 3, 2)), (S(0), S(0)), torch.linalg.solve, S(0), 0.0),
}  # fmt: skip


def _tensors(shapes: tuple[Shape, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def _run(rank: int, n: int) -> list[tuple]:
    found = []
    for shapes, sbps, op, _, _ in CASES.values():
        xs = [
            distribute(x, Placement("cpu", range(n)), sbp).requires_grad_()
            for x, sbp in zip(_tensors(shapes), sbps, strict=True)
        ]
        with plain_may_differ(), counting() as log:
            y = op(*xs)
        sent = log.bytes
        (y * y * (y + 1)).sum().backward()
        found.append((y.sbp, y.full().detach(), [(x.grad.sbp, x.grad.full()) for x in xs], sent))
    return found


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_what_a_rank_lacks_is_exchanged_and_nothing_else_moves(n: int) -> None:
    by_rank = pool(n).run(_run, n)
    for name, (shapes, sbps, op, out, part), *ranks in zip(CASES, CASES.values(), *by_rank):
        xs = [x.requires_grad_() for x in _tensors(shapes)]
        want = op(*xs)
        (want * want * (want + 1)).sum().backward()
        expected = [want.detach(), *(x.grad for x in xs)]
        for sbp, value, grads, sent in ranks:
            assert (sbp, [entry for entry, _ in grads]) == ((out,), [(s,) for s in sbps]), name
            for found, right in zip((value, *(grad for _, grad in grads)), expected, strict=True):
                assert torch.allclose(found, right), name
            assert sent <= part * max(x.nbytes for x in xs), (name, sent)
