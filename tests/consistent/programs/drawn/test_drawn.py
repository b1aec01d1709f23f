"""A small slice of ``benchmarks/drawn_programs.py``."""

from __future__ import annotations

import random

import pytest

from benchmarks.drawn_programs import outcomes
from tests.consistent.programs.drawn.check import DROPPED, KINDS, RIGHT
from tests.ranks import ALL, SIZES


def _some_of_each_kind(ranks: int) -> list[int]:
    """Seeds of other programs for each number of ranks, one of each kind."""
    seeds: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for seed in range(200):
        seeds[random.Random(seed).choice(list(KINDS))].append(seed)
    return [found[ranks - 2] for found in seeds.values()]


@pytest.mark.parametrize("ranks", SIZES)
def test_drawn_programs_are_right(ranks: int) -> None:
    seeds = list(range(200)) if ALL else _some_of_each_kind(ranks)
    found = outcomes(seeds, ranks, list(KINDS))
    assert [text for state, text in found if state not in (RIGHT, DROPPED)] == []
    assert sum(state == RIGHT for state, _ in found) > len(seeds) // 2
