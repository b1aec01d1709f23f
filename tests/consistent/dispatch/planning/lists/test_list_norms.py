"""``torch._foreach_norm`` of every order, dtype and layout; lists that are empty or do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consistent import B, P, S
from tests.ranks import SIZES, in_turn, pool
from tests.twins import GRIDS, Laid, compare, randn

INF = float("inf")
ORDERS = [2, 1, 0, 3, 0.5, -1, -2.5, INF, -INF]
LAYOUTS = [(B, B), (S(0), B), (S(0), S(0)), (P, B), (B, P), (S(0), P)]


def values() -> list[torch.Tensor]:
    zeros = randn(5, seed=2)
    zeros[1:3] = 0
    return [randn(4, 3), zeros, randn(1, seed=3), randn(2, 2, seed=4), torch.zeros(3).double()]


def orders(at: Laid) -> list[Any]:
    found = []
    for first in LAYOUTS:
        for second in LAYOUTS:
            ours = [at(x, *(second if i % 2 else first)) for i, x in enumerate(values())]
            found += [torch._foreach_norm(ours, order) for order in ORDERS]
    return found


def dtypes(at: Laid) -> list[Any]:
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        whole = [x.to(dtype) for x in values()]
        for layout in LAYOUTS[:3]:
            ours = [at(x, *layout) for x in whole]
            for order in (2, 1, 0, INF, -INF, -1):
                found.append(torch._foreach_norm(ours, order))
                if not dtype.is_complex:
                    found.append(torch._foreach_norm(ours, order, dtype=torch.float64))
    return found


def mixed_dtypes(at: Laid) -> Any:
    dtypes = (torch.float16, torch.float32, torch.float64)
    ours = [at(randn(4, 3, seed=i).to(d), S(0)) for i, d in enumerate(dtypes)]
    return torch._foreach_norm(ours), torch._foreach_norm(ours, INF)


def large_halves(at: Laid) -> list[Any]:
    """Sums of their squares are beyond float16, the norms are not."""
    whole = [torch.full((90, 40), 200.0).half(), torch.full((90,), 6e4).bfloat16()]
    return [torch._foreach_norm([at(x, *layout) for x in whole]) for layout in LAYOUTS[:3]]


def extreme_numbers(at: Laid) -> list[Any]:
    some = torch.tensor([1.0, INF, -2.0, 0.5, 3.0]).double()
    nan = torch.tensor([1.0, float("nan"), -2.0, 0.5, 3.0]).double()
    return [
        torch._foreach_norm([at(x, *layout) for x in (some, nan)], order)
        for layout in LAYOUTS[:3]
        for order in (2, 1, 0, INF, -INF, -1)
    ]


def empty_tensors(at: Laid) -> list[Any]:
    found = []
    for order in ORDERS:
        try:
            found.append(torch._foreach_norm([at(torch.zeros(0, 3).double(), S(0))], order))
        except RuntimeError:
            found.append("raised")
    return found


def plain_ones_among_them(at: Laid) -> list[Any]:
    ours = [x if i % 2 else at(x, S(0)) for i, x in enumerate(values())]
    return [torch._foreach_norm(ours, order) for order in ORDERS]


def with_gradients(at: Laid) -> list[Any]:
    found = []
    for layout in LAYOUTS:
        x = at.leaf(randn(4, 3), *layout)
        for order in (2, 1, 3, INF):
            sum(torch._foreach_norm([x, x * 2], order)).backward()
        found.append(x.grad)
    return found


def lists_that_do_not_fit(at: Laid) -> list[str]:
    ours = [at(x, S(0)) for x in values()]
    found = []
    for call in (
        lambda: torch._foreach_add(ours, ours[:2]),
        lambda: torch._foreach_add(ours, [1.0, 2.0]),
        lambda: torch._foreach_addcmul_(ours, ours, ours[1:]),
        lambda: torch._foreach_mul(ours, torch.ones(2)),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        found.append(error.type.__name__)
    return found


CASES = [
    orders, dtypes, mixed_dtypes, large_halves, extreme_numbers, empty_tensors,
    plain_ones_among_them, lists_that_do_not_fit, with_gradients,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_torch(case: Any) -> None:
    for world in SIZES if case is orders else in_turn(CASES.index(case)):
        pool(world).run(compare, case, GRIDS[world])
