"""Which inputs an output of a plane looks at."""

from __future__ import annotations

import pytest

from consistent.rules.halo.spatial import resampling_factors, window_ranges


def test_windows_reach_over_the_padding_and_no_further_than_the_last() -> None:
    assert window_ranges(2, 1, 3)(0, 2) == [(-1, 4)]
    assert window_ranges(2, 1, 3)(2, 2) == []


@pytest.mark.parametrize(
    ("n", "m", "expected"), [(4, 12, (3, 1)), (12, 4, (1, 3)), (4, 4, (1, 1)), (4, 6, None)]
)
def test_only_whole_factors_have_a_reach(n: int, m: int, expected: object) -> None:
    assert resampling_factors(n, m) == expected
