"""Matrices are dealt out to ranks by shapes alone, and evenly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from consistent.nn.owned.deal import Shape, assign_owners, flops_of

BLOCK = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
SHAPES = {
    "12 blocks": BLOCK * 12,
    "6 blocks with a head": [*BLOCK * 6, (50257, 768)],
    "of all sizes": [(64 * i, 96 * j) for i in range(1, 7) for j in range(1, 7)],
    "with vectors and kernels": [(64, 32, 3, 3)] * 9 + [(64,)] * 9 + [(128, 64)] * 6,
}


def newton_schulz(shape: Shape) -> float:
    return flops_of(shape)


def shampoo(shape: Shape) -> float:
    m, n = shape[0], flops_of(shape) and shape[-1]
    return float(m * m * n + n * n * m)


@pytest.mark.parametrize("ranks", [[0, 1], [2, 0, 1], [4, 5, 6, 7], [0]])
@pytest.mark.parametrize("name", SHAPES)
def test_the_busiest_rank_has_little_more_than_its_share(name: str, ranks: list[int]) -> None:
    shapes = SHAPES[name]
    costs = [flops_of(shape) for shape in shapes]
    owners = assign_owners(shapes, costs, ranks, {})
    busiest = max(_shares(owners, costs, ranks))
    assert set(owners) <= set(ranks) and busiest <= max(1.05 * sum(costs) / len(ranks), max(costs))


@pytest.mark.parametrize("measure", [newton_schulz, shampoo])
def test_equal_blocks_are_shared_evenly_by_any_measure(measure: Callable[[Shape], float]) -> None:
    shapes = SHAPES["12 blocks"]
    for ranks in ([0, 1], [0, 1, 2], [3, 2, 1, 0]):
        owners = assign_owners(shapes, [flops_of(shape) for shape in shapes], ranks, {})
        shares = _shares(owners, [measure(shape) for shape in shapes], ranks)
        assert max(shares) == min(shares)


def test_what_comes_later_goes_to_the_rank_with_least() -> None:
    loads: dict[int, tuple[float, int]] = {}
    assert assign_owners([(4, 4)], [10.0], [0, 1], loads) == [0]
    assert assign_owners([(2, 2), (2, 2)], [4.0, 4.0], [0, 1], loads) == [1, 1]
    assert loads == {0: (10.0, 1), 1: (8.0, 2)}


def test_a_vector_counts_as_its_elements_and_a_kernel_as_a_matrix() -> None:
    assert flops_of((7,)) == 7.0 and flops_of(()) == 1.0 and flops_of((0, 5)) == 0.0
    assert flops_of((4, 2, 3, 1)) == flops_of((4, 6)) == flops_of((6, 4)) == 16 * (12 + 4)


def _shares(owners: list[int], costs: list[float], ranks: list[int]) -> list[float]:
    return [sum(c for o, c in zip(owners, costs, strict=True) if o == rank) for rank in ranks]
