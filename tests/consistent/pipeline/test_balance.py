"""Stages are cut so that the slowest is as fast as it can be: beside all ways to cut."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from consistent.pipeline.balance import best_ends, even_ends


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=7),
    st.integers(1, 4),
    st.lists(st.integers(5, 60), min_size=4, max_size=4),
)
@example([1, 1, 1, 6, 1], 4, [5, 5, 5, 7])  # the furthest end leaves a unit that fits nowhere
def test_equals_all_ways_to_cut(seconds: list[int], stages: int, memory: list[int]) -> None:
    room = sorted(memory)  # a later stage has more

    def fits(stage: int, begin: int, end: int) -> bool:
        return sum(seconds[begin:end]) <= room[stage]

    ways = []
    for cuts in itertools.combinations(range(1, len(seconds)), stages - 1):
        ends = [*cuts, len(seconds)]
        pairs = list(zip([0, *ends], ends, strict=False))
        if all(fits(stage, a, b) for stage, (a, b) in enumerate(pairs)):
            ways.append(max(sum(seconds[a:b]) for a, b in pairs))
    found = best_ends(list(map(float, seconds)), stages, fits)
    if not ways:
        assert found is None
        return
    assert found is not None and len(found) == stages and found[-1] == len(seconds)
    slowest = max(sum(seconds[a:b]) for a, b in zip([0, *found], found, strict=False))
    assert slowest == min(ways)


def test_even_stages_are_the_fastest_from_the_last_one_on() -> None:
    assert even_ends([1.0] * 7, 3) == [2, 4, 7]
    assert even_ends([0.1] * 8, 3) == [2, 5, 8]
    assert even_ends([9.0, 1.0, 1.0, 1.0], 3) == [1, 2, 4]
    assert even_ends([0.0, 0.0, 0.0], 3) == [1, 2, 3]
