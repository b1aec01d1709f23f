"""Factories give torch's values, and random ones that do not depend on the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, Placement, S
from tests.ranks import ON_ONE_AXIS, pool

PLAIN: list[tuple[str, tuple, dict]] = [
    ("zeros", (5, 3), {}),
    ("zeros", ((5, 3),), {"dtype": torch.int64}),
    ("ones", (5, 3), {"dtype": torch.float64}),
    ("ones", (), {"size": (5,)}),
    ("full", ((5, 3), 7), {}),
    ("full", ((5,), 0.5), {"dtype": torch.float16}),
    ("eye", (5,), {}),
    ("eye", (7, 5), {"dtype": torch.int64}),
    ("arange", (7,), {}),
    ("arange", (1, 9, 0.7), {}),
    ("linspace", (0, 1, 11), {}),
    ("linspace", (), {"start": 0.1, "end": 2, "steps": 37}),
    ("logspace", (0, 1, 7), {"base": 2.0}),
    ("tensor", ([[1, 2], [3, 4], [5, 6]],), {}),
    ("tensor", ([1.5, 2.5],), {"dtype": torch.float64}),
]
RANDOM: list[tuple[str, tuple, dict]] = [
    ("rand", (5, 3), {}),
    ("rand", (5, 3), {"dtype": torch.bfloat16}),
    ("randn", (5, 3), {"dtype": torch.float64}),
    ("randn", ((6,),), {"dtype": torch.complex64}),
    ("normal", (2.0, 3.0, (5, 3)), {}),
    ("randint", (3, 9, (5, 3)), {}),
    ("randint", (9, (6,)), {"dtype": torch.int32}),
    ("randperm", (7,), {}),
]


def _made(rank: int, n: int, cases: list) -> list:
    placement = Placement("cpu", range(n))
    found = []
    for name, args, options in cases:
        size = torch.Size(())
        for sbp in (B, P, S(0), S(-1)):
            torch.manual_seed(5)
            x = getattr(consistent, name)(*args, **options, placement=placement, sbp=sbp)
            size = x.shape
            found.append((name, sbp, x.full(), tuple(size)))
    return found


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_values_are_those_of_torch(n: int) -> None:
    for found in pool(n).run(_made, n, PLAIN):
        for i, (name, sbp, full, shape) in enumerate(found):
            _, args, options = PLAIN[i // 4]
            want = getattr(torch, name)(*args, **options)
            assert full.dtype == want.dtype and shape == tuple(want.shape)
            assert torch.equal(full, want), (name, sbp)


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_random_values_do_not_depend_on_layout_or_ranks(n: int) -> None:
    alone = _made(0, 1, RANDOM)
    for found in pool(n).run(_made, n, RANDOM):
        for (name, sbp, full, _), (_, _, want, _) in zip(found, alone, strict=True):
            assert torch.equal(full, want), (name, sbp)


def _states(rank: int) -> list:
    outside = Placement("cpu", [1])
    torch.manual_seed(0)
    for name, args, options in RANDOM:
        getattr(consistent, name)(*args, **options, placement=outside, sbp=S(0))
    return consistent.randn(3, placement=Placement("cpu", [0, 1]), sbp=B).to_local().tolist()


def test_ranks_outside_a_placement_count_its_random_ops() -> None:
    first, second = pool(2).run(_states)
    assert first == second


def _by_generator(rank: int) -> list:
    everywhere = Placement("cpu", range(2))
    found = []
    for _ in range(2):
        g = torch.Generator().manual_seed(3)
        found += [
            consistent.randn(4, placement=everywhere, sbp=S(0), generator=g).full()
            for _ in range(2)
        ]
    return found


def test_a_generator_of_the_user_decides() -> None:
    a, b, c, d = pool(2).run(_by_generator)[0]
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)


def _leaf(rank: int) -> Any:
    w = consistent.ones(4, placement=Placement("cpu", range(2)), sbp=B, requires_grad=True)
    (w * 3).sum().backward()
    return w.grad.sbp, w.grad.full()


def test_requires_grad_makes_a_leaf_whose_gradient_is_boxed() -> None:
    for sbp, grad in pool(2).run(_leaf):
        assert sbp == (B,) and torch.equal(grad, torch.full((4,), 3.0))


ONE = Placement("cpu", [0])


@pytest.mark.parametrize(
    "options, error",
    [
        ({"placement": ONE}, "sbp is missing"),
        ({"sbp": B}, "placement is missing"),
        ({}, "placement and sbp is missing"),
        ({"placement": ONE, "sbp": B, "device": "cpu"}, "Leave device= out"),
    ],
)
def test_placement_and_sbp_are_needed_and_a_device_is_not(options: dict, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        consistent.zeros(3, **options)


def test_wrong_arguments_raise_as_in_torch() -> None:
    with pytest.raises(TypeError):
        consistent.randint(placement=ONE, sbp=B)
    with pytest.raises(RuntimeError):
        consistent.zeros(-1, placement=ONE, sbp=B)
    with pytest.raises(ValueError, match="2 entries"):
        consistent.zeros(3, placement=ONE, sbp=(B, B))
    with pytest.raises(ValueError, match="truth values"):
        consistent.zeros(3, placement=ONE, sbp=P, dtype=torch.bool)


def test_errors_name_the_function_that_was_called() -> None:
    with pytest.raises(TypeError, match="^normal: device="):
        consistent.normal(0.0, 1.0, (2,), placement=ONE, sbp=B, device="cpu")
    with pytest.raises(RuntimeError, match="std"):
        consistent.normal(0.0, -1.0, (2,), placement=ONE, sbp=B)
