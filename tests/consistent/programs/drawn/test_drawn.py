"""A small slice of ``benchmarks/drawn_programs.py``."""

from __future__ import annotations

import pytest

from benchmarks.drawn_programs import outcomes
from tests.consistent.programs.drawn.check import DROPPED, KINDS, RIGHT
from tests.ranks import ALL, SIZES


@pytest.mark.parametrize("ranks", SIZES)
def test_drawn_programs_are_right(ranks: int) -> None:
    count = 200 if ALL else 24
    found = outcomes(list(range(count)), ranks, list(KINDS))
    assert [text for state, text in found if state not in (RIGHT, DROPPED)] == []
    assert sum(state == RIGHT for state, _ in found) > count // 2
