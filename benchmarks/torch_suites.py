"""Are torch's own modules and optimizers right on global tensors? Compares all samples of torch's
module and optimizer databases, with parameters and inputs B and S(0), with plain torch.

    python benchmarks/torch_suites.py --ranks 2                              all
    python benchmarks/torch_suites.py --ranks 3 --suite modules --every 10   every 10th sample
    python benchmarks/torch_suites.py --only 'RNN|LSTM'

For modules it compares outputs, buffers and the gradients of inputs and parameters; for optimizers
losses, parameters and states over some steps. Random numbers differ from torch's by design, so
modules that draw them are compared with themselves under B. It prints each failing case with its
reason, and one line with the counts of each suite. A case that plain torch refuses too is not
counted.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import suite_cases
from benchmarks.suite_cases import LAYOUTS
from tests.ranks import Pool, RankError

SUITES = ("modules", "optimizers")
OUTCOMES = ("right", "torch raises", "raises", "wrong", "hangs")  # the last one counts
TOGETHER = 64  # samples in one call of the ranks
SECONDS = 60.0  # seconds that a call may take, before what each sample adds
SECONDS_EACH = 10.0

Found = list[tuple[str, str]]  # (outcome, message) of each layout, sample by sample


def outcomes(pool: Pool, suite: str, name: str, indices: list[int]) -> Found:
    """The outcomes of one call of all ``indices``, or of single calls if the ranks ended
    differently."""
    try:
        seconds = SECONDS + SECONDS_EACH * len(indices)
        by_rank = pool.run(suite_cases.run_cases, suite, name, indices, timeout=seconds)
    except RankError as error:
        pool.close()
        return _one_by_one(pool, suite, name, indices, ("hangs", str(error)[:600]))
    by_case = list(zip(*by_rank, strict=True))
    if any(len({outcome == "raises" for outcome, _ in found}) > 1 for found in by_case):
        pool.close()  # some may have left others waiting
        if len(indices) > 1:
            return _one_by_one(pool, suite, name, indices, ("hangs", ""))
    return [max(found, key=lambda each: OUTCOMES.index(each[0])) for found in by_case]


def _one_by_one(
    pool: Pool, suite: str, name: str, indices: list[int], hung: tuple[str, str]
) -> Found:
    if len(indices) == 1:
        return [hung] * len(LAYOUTS)
    return [each for i in indices for each in outcomes(pool, suite, name, [i])]


def sweep(pool: Pool, suite: str, name: str, every: int) -> Iterator[tuple[str, str, str]]:
    """(case in words, outcome, message) of every k-th sample of a module or optimizer."""
    indices = list(range(0, suite_cases.count(suite, name), every))
    for start in range(0, len(indices), TOGETHER):
        some = indices[start : start + TOGETHER]
        found = iter(outcomes(pool, suite, name, some))
        for index in some:
            words = suite_cases.describe(suite, name, index)
            for params, inputs in LAYOUTS:
                yield f"{words}, parameters {params}, inputs {inputs}", *next(found)


def run_suite(pool: Pool, suite: str, only: str, every: int) -> Counter[str]:
    """Run a suite and print each failing case; returns how many cases had each outcome."""
    counts: Counter[str] = Counter()
    for name in suite_cases.names(suite):
        if not re.search(only, name):
            continue
        for words, outcome, message in sweep(pool, suite, name, every):
            counts[outcome] += 1
            if outcome not in ("right", "torch raises"):
                print(f"{outcome}: {words}\n    {message}", flush=True)
    return counts


def summary(suite: str, ranks: int, counts: Counter[str]) -> str:
    """The line of a suite."""
    cases = sum(counts.values()) - counts["torch raises"]
    bad = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES[2:])
    left_out = f"; {counts['torch raises']} that plain torch refuses" * bool(counts["torch raises"])
    return f"{suite}, {ranks} ranks: {counts['right']:,} of {cases:,} right, {bad}{left_out}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--suite", choices=SUITES, help="only this one")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--every", type=int, default=1, help="only every k-th sample")
    options = parser.parse_args(given)
    pool = Pool(options.ranks)
    for suite in (options.suite,) if options.suite else SUITES:
        counts = run_suite(pool, suite, options.only, options.every)
        print(summary(suite, options.ranks, counts), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
