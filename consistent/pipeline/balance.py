"""Where each stage of a pipeline ends: the slowest is as fast as it can be, within the memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_NEAR = 1e-9  # limits that differ by less, of the whole, are one


def best_ends(
    seconds: Sequence[float], stages: int, fits: Callable[[int, int, int], bool]
) -> list[int] | None:
    """Where each stage ends, so that the slowest takes the least time; None if nothing fits.

    For a limit of seconds, a stage that begins later may end no earlier. So the furthest end of
    each stage, given the furthest end of the one before, says whether the limit can be kept; the
    least limit is found by halving.

    Args:
        seconds: of each unit, in order.
        fits: (stage, begin, end) -> whether it may have these units. Of one begin, a smaller end
            fits where a larger one does; and so does a larger begin.
    """
    if stages > len(seconds):
        return None
    sums = [0.0, *accumulate(seconds)]
    furthest: dict[tuple[int, int], int] = {}  # that memory allows

    def room(stage: int, begin: int, most: int) -> int:
        key = stage, begin
        if key not in furthest:
            low, high = begin, most  # what fits and what may
            if low < high and fits(stage, begin, high):
                low = high
            while low < high:
                middle = (low + high + 1) // 2
                if fits(stage, begin, middle):
                    low = middle
                else:
                    high = middle - 1
            furthest[key] = low
        return furthest[key]

    low, high = max([*seconds, sums[-1] / stages]), sums[-1]
    best = _ends(sums, stages, room, high)
    if best is None:
        return None
    near = _NEAR * sums[-1]
    first = _ends(sums, stages, room, low + near)
    if first is not None:
        return first
    while high - low > near:
        middle = (low + high) / 2
        found = _ends(sums, stages, room, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, _slowest(sums, found))
    return best


def even_ends(seconds: Sequence[float], stages: int) -> list[int]:
    """``best_ends`` where all fits; of such ends, those of which the last stage has the most units,
    and those before it are cut in the same way."""
    sums, ends = [0.0, *accumulate(seconds)], [len(seconds)]
    for count in range(stages, 1, -1):
        found = best_ends(seconds[: ends[-1]], count, lambda *_: True)
        assert found is not None, "there are as many units as stages"
        least = sums[ends[-1]] - _slowest(sums, found) - _NEAR * sums[-1]
        ends.append(max(bisect_left(sums, least), count - 1))
    return ends[::-1]


def _slowest(sums: Sequence[float], ends: Sequence[int]) -> float:
    return max(sums[b] - sums[a] for a, b in zip([0, *ends], ends, strict=False))


def _ends(
    sums: Sequence[float], stages: int, room: Callable[[int, int, int], int], limit: float
) -> list[int] | None:
    """The furthest ends that keep the limit.

    Where a unit does not fit in the stage that it came to, even alone, it belongs to a later stage,
    and the stages up to this one end before it: they begin again with that as their bound.
    """
    count = len(sums) - 1
    allowed = [count - (stages - stage - 1) for stage in range(stages)]  # each later one has a unit
    bounds = list(allowed)
    while True:
        ends, begin = [], 0
        for stage in range(stages):
            quick = max(bisect_right(sums, sums[begin] + limit) - 1, begin + 1)
            end = min(quick, room(stage, begin, allowed[stage]), bounds[stage])
            if end == begin:
                break
            ends.append(end)
            begin = end
        else:
            return ends if begin == count else None
        if begin <= stage:  # no unit is left for one of them
            return None
        for before in range(stage + 1):
            bounds[before] = min(bounds[before], begin - (stage - before))
