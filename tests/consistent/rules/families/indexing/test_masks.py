"""Masks that broadcast against what they select from or write to, in every way: as plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from consistent import B, P, Placement, S
from consistent.spec import Sbp
from tests.ranks import ALL, ON_ONE_AXIS, pool
from tests.twins import GRIDS, Laid, assert_same, randn

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(5, 5), (1, 5), (5, 1), (2, 5, 5), (5,), ()]


def _pairs() -> Iterator[tuple[Shape, Shape]]:
    """Shapes of a tensor and of a mask that broadcast together."""
    for shape in SHAPES:
        for mask in SHAPES:
            try:
                torch.broadcast_shapes(shape, mask)
            except RuntimeError:
                continue
            yield shape, mask


def _mask(shape: Shape) -> torch.Tensor:
    return randn(*shape, seed=5) > 0


def _set(x: Any, mask: Any) -> Any:
    y = x.clone()
    y[mask] = 1.5
    return y


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "masked_select": torch.masked_select,
    "x.masked_select": lambda x, m: x.masked_select(m),
    "masked_fill": lambda x, m: torch.masked_fill(x, m, 2.5),
    "masked_fill of a tensor": lambda x, m: torch.masked_fill(x, m, torch.tensor(2.5).double()),
    "masked_fill of -inf": lambda x, m: torch.masked_fill(x, m, float("-inf")),
    "masked_fill_": lambda x, m: x.clone().masked_fill_(m, 2.5),
    "masked_scatter": lambda x, m: torch.masked_scatter(x, m, randn(50, seed=9)),
    "masked_scatter_": lambda x, m: x.clone().masked_scatter_(m, randn(50, seed=9)),
    "where": lambda x, m: torch.where(m, x, 0.5),
    "x[mask]": lambda x, m: x[m],
    "x[mask] = v": _set,
    "x * mask": lambda x, m: x * m,
    "nonzero": lambda x, m: m.nonzero(),
}


def _result(op: Callable[[Any, Any], Any], at: Laid, shapes: tuple[Shape, Shape], *sbp: Sbp) -> Any:
    """(result, gradient of the tensor), or "error" where the op refuses."""
    x, mask = at.leaf(randn(*shapes[0]), sbp[0]), at(_mask(shapes[1]), sbp[1])
    try:
        out = op(x, mask)
    except (RuntimeError, IndexError):
        return "error"
    if out.requires_grad:
        (out * randn(*out.shape, seed=7)).sum().backward()
    return out, x.grad


# Of the pairs each op takes every fifth one, others than the op before it: each shape of a tensor
# and of a mask is among them.
EVERY = 1 if ALL else 5


def _check(rank: int, ranks: Any, name: str) -> list[str]:
    op, wrong = CASES[name], []
    for shape, mask in list(_pairs())[list(CASES).index(name) % EVERY :: EVERY]:
        wanted = _result(op, Laid(None), (shape, mask), B, B)
        for first in [B, P, *(S(d) for d in range(len(shape)))]:
            for second in [B, *(S(d) for d in range(len(mask)))]:
                at = Laid(Placement("cpu", ranks))
                try:
                    assert_same(_result(op, at, (shape, mask), first, second), wanted)
                except Exception as error:  # noqa: BLE001  (all of them are listed together)
                    wrong.append(f"{shape} {first}, {mask} {second}: {str(error)[:200]}")
    return wrong


@pytest.mark.parametrize("n", ON_ONE_AXIS)
@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_every_shape_with_every_layout(name: str, n: int) -> None:
    for wrong in pool(n).run(_check, GRIDS[n], name):
        assert not wrong, "\n".join(wrong[:10])
