"""Programs drawn from seeds, on ranks against one process: functions of the user's, writes through
views in every grad mode, errors that are caught, tied weights in stages, batches of dicts and texts
(tests/consistent/programs/drawn/).

    python -m benchmarks.drawn_programs --count 2000 --ranks 2 3 4

draws programs until so many were compared, and prints how many came out right, with a clear error
(the same on every rank), silently different or hanging, and the seed of each that is not right. A
program that one process refuses as well compares nothing: it is dropped, and does not count.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.consistent.programs.drawn.check import DIFFERENT, DROPPED, ERROR, KINDS, RIGHT, check
from tests.ranks import pool
from tests.twins import GRIDS

HANG = "hang"
AT_ONCE = 20  # programs in one call of the pool
# After these the ranks are out of step, and what comes of the next program says nothing.
BROKEN = ("stays broken", "Ranks of one group must", "so every rank stops")
SECONDS = 20.0  # that one program may take


def several(rank: int, seeds: Sequence[int], grid: Any, kinds: Sequence[str]) -> list:
    """The outcomes of ``seeds`` on this rank."""
    return [check(rank, seed, grid, kinds) for seed in seeds]


def outcomes(seeds: Sequence[int], ranks: int, kinds: Sequence[str]) -> list[tuple[str, str]]:
    """One outcome for each seed. Where the ranks of a call end differently, its programs run again
    one by one, in fresh processes."""
    try:
        found = pool(ranks).run(
            several, seeds, GRIDS[ranks], kinds, timeout=SECONDS * (1 + len(seeds) / 4)
        )
    except Exception as error:
        if len(seeds) == 1:
            text = f"{seeds[0]} on {ranks}: {error}"
            return [(HANG if "stuck" in str(error) else DIFFERENT, text)]
        return [each for seed in seeds for each in outcomes([seed], ranks, kinds)]
    judged = [_judged(each) for each in zip(*found, strict=True)]
    for i, (_, text) in enumerate(judged):
        if any(words in text for words in BROKEN):
            pool(ranks).close()  # what comes after it says nothing
            return [
                *judged[: i + 1],
                *(outcomes(seeds[i + 1 :], ranks, kinds) if seeds[i + 1 :] else ()),
            ]
    return judged


def _judged(by_rank: Sequence[tuple[str, str]]) -> tuple[str, str]:
    if len({state for state, _ in by_rank}) == 1 and by_rank[0][0] != DIFFERENT:
        return by_rank[0]
    return DIFFERENT, "\n    ".join(f"rank {r}: {s}: {t}" for r, (s, t) in enumerate(by_rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="programs to compare on each world")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    given = parser.parse_args()
    began = time.monotonic()
    for ranks in given.ranks:
        counts, kinds, first = Counter[str](), Counter[str](), given.seed
        while (left := given.count - counts.total() + counts[DROPPED]) > 0:
            if time.monotonic() - began > given.seconds:
                break
            seeds = range(first, first + min(AT_ONCE, left))
            first = seeds.stop
            for state, text in outcomes(list(seeds), ranks, given.kinds):
                counts[state] += 1
                kinds[text] += state == RIGHT
                if state not in (RIGHT, DROPPED):
                    print(f"  {state}: {text[:600]}", flush=True)
        line = ", ".join(f"{counts[s]} {s}" for s in (RIGHT, ERROR, DIFFERENT, HANG, DROPPED))
        drawn = f"seeds {given.seed} to {first - 1}"
        print(f"{ranks} ranks, {drawn}: {line}; right by kind: {dict(+kinds)}", flush=True)


if __name__ == "__main__":
    main()
