"""Choose where each pipeline stage ends, so that the slowest stage is fast and memory suffices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_TOLERANCE = 1e-9  # limits closer than this fraction of the total time count as equal


def best_ends(
    seconds: Sequence[float], stages: int, fits: Callable[[int, int, int], bool]
) -> list[int] | None:
    """Return the end of each stage that minimizes the time of the slowest; None if nothing fits.

    [1, 2, 3, 3] in 2 stages -> [3, 4], or [2, 4] if 3 units do not fit in the memory of stage 0.

    The minimum is found by bisection on a time limit for every stage. Under a fixed limit, a stage
    that begins later can end no earlier. It is therefore enough to extend each stage as far as it
    can go, one after another: the limit can be kept if the last stage reaches the last unit.

    Args:
        seconds: the time of each unit, in order.
        stages: the number of stages.
        fits: (stage, begin, end) -> whether the stage has memory for units ``begin`` to ``end``,
            ``end`` excluded. Must be monotonic: if a range fits, it also fits with a smaller end or
            a larger begin.

    Returns:
        for each stage, the index of the first unit after it.
    """
    if stages > len(seconds):
        return None
    sums = [0.0, *accumulate(seconds)]
    furthest: dict[tuple[int, int], int] = {}  # (stage, begin) -> furthest end that memory allows

    def furthest_end(stage: int, begin: int, max_end: int) -> int:
        key = stage, begin
        if key not in furthest:
            furthest[key] = _last_that_fits(begin, max_end, lambda end: fits(stage, begin, end))
        return furthest[key]

    return _ends_of_least_limit(sums, stages, furthest_end, max([*seconds, sums[-1] / stages]))


def _ends_of_least_limit(
    sums: Sequence[float], stages: int, furthest_end: Callable[[int, int, int], int], low: float
) -> list[int] | None:
    """Return the ends under the least time limit that can be kept, found by bisection.

    Args:
        sums: the prefix sums of the units' seconds, beginning with 0.
        stages: the number of stages.
        furthest_end: (stage, begin, max_end) -> the furthest end, up to ``max_end``, that memory
            allows.
        low: a lower bound of the time limit.
    """
    high, tolerance = sums[-1], _TOLERANCE * sums[-1]
    best = _ends_within_limit(sums, stages, furthest_end, high)
    if best is None:
        return None
    first = _ends_within_limit(sums, stages, furthest_end, low + tolerance)
    if first is not None:
        return first
    while high - low > tolerance:
        middle = (low + high) / 2
        ends = _ends_within_limit(sums, stages, furthest_end, middle)
        if ends is None:
            low = middle
        else:
            best, high = ends, min(middle, _slowest_seconds(sums, ends))
    return best


def _last_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the greatest number from ``low`` to ``high`` that fits, by bisection.

    ``low`` is returned without a test. If a number fits, all smaller ones must.
    """
    if low < high and fits(high):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def even_ends(seconds: Sequence[float], stages: int) -> list[int]:
    """Return the ends of ``best_ends`` without a memory limit.

    Several choices may be equally fast, as only the slowest stage counts. Then the last stage takes
    as many units as it can, then the stage before it as many of the others, and so on: [4, 1, 1, 1,
    1] in 3 stages -> [1, 2, 5].
    """
    sums, ends = [0.0, *accumulate(seconds)], [len(seconds)]
    for count in range(stages, 1, -1):
        fastest = best_ends(seconds[: ends[-1]], count, lambda *_: True)
        assert fastest is not None, "there are as many units as stages"
        least = sums[ends[-1]] - _slowest_seconds(sums, fastest) - _TOLERANCE * sums[-1]
        ends.append(max(bisect_left(sums, least), count - 1))
    return ends[::-1]


def _slowest_seconds(sums: Sequence[float], ends: Sequence[int]) -> float:
    """Return the seconds of the slowest stage."""
    return max(sums[b] - sums[a] for a, b in zip([0, *ends], ends, strict=False))


def _ends_within_limit(
    sums: Sequence[float], stages: int, furthest_end: Callable[[int, int, int], int], limit: float
) -> list[int] | None:
    """Return the furthest end of each stage within ``limit`` seconds, or None if there is none.

    If the next unit does not fit in the memory of a stage even alone, it belongs to a later stage.
    All stages up to this one must then end before that unit, and the search starts again with these
    bounds.

    Args:
        sums: the prefix sums of the units' seconds, beginning with 0.
        stages: the number of stages.
        furthest_end: (stage, begin, max_end) -> the furthest end, up to ``max_end``, that memory
            allows.
        limit: the most seconds of a stage.
    """
    count = len(sums) - 1
    # One unit for each later stage.
    latest_ends = [count - (stages - stage - 1) for stage in range(stages)]
    bounds = list(latest_ends)
    while True:
        ends, begin = [], 0
        for stage in range(stages):
            # One unit never exceeds the limit, except by rounding.
            timely_end = max(bisect_right(sums, sums[begin] + limit) - 1, begin + 1)
            end = min(timely_end, furthest_end(stage, begin, latest_ends[stage]), bounds[stage])
            if end == begin:
                break
            ends.append(end)
            begin = end
        else:
            return ends if begin == count else None
        if begin <= stage:  # fewer units before ``begin`` than stages that must share them
            return None
        for earlier in range(stage + 1):
            bounds[earlier] = min(bounds[earlier], begin - (stage - earlier))
