"""Is every op right under every split? Runs PyTorch's operator database, with ours and DTensor on
the same samples in one run.

    python benchmarks/op_coverage.py --ranks 2                       all operators
    python benchmarks/op_coverage.py --ranks 2x2 --every 8           every 8th, on two axes
    python benchmarks/op_coverage.py --ranks 3 --ops 'softmax|matmul' --samples 6 --ours-only
    python benchmarks/op_coverage.py --table docs/coverage.md        the table of all runs so far

Inputs are laid out as B, S(d) for every d, even or not, and P (random addends): the first tensor
alone, the second alone, and all that can be. Forward, backward and in place are compared with plain
torch on the whole tensors. Each case ends as right, raises, wrong or hangs. After a hang its side
gets new processes, and the operator goes on with its next sample, up to a few hangs. Finished work
is kept in --out, and a run that is started again goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.coverage_cases import MODES, Grid, How, get_ready, operators, plan, run_cases
from tests.ranks import Pool, RankError

Case = tuple[int, How, str]  # sample, layout, mode
MOST_RESTARTS = 3  # of one side for one operator
OUTCOMES = ("right", "raises", "wrong", "hangs", "not run")


class Side:
    """The ranks of one side. A hang of the other side does not affect them."""

    def __init__(self, who: str, grid: Grid, timeout: float) -> None:
        self.who, self.grid, self.timeout, self.error = who, grid, timeout, ""
        self.restarts = 0
        self.pool = Pool(torch.Size(grid).numel())
        self.restart()

    def restart(self) -> None:
        """Start new processes."""
        self.restarts += 1
        self.pool.close()
        self.pool.run(get_ready, self.who, self.grid, timeout=300)

    def run(self, name: str, count: int, cases: list[Case]) -> list[tuple[str, str]]:
        """(outcome, message) of each case: all in one call, and then one by one if ranks ended
        differently, so that what one case leaves behind does not affect the next."""
        together = self._try(name, count, cases, self.timeout + 0.3 * len(cases))
        if together is not None:
            return together
        made: list[tuple[str, str]] = []
        hung: set[int] = set()
        before = self.restarts
        for each in cases:
            # A sample that hangs would hang again, and new processes take seconds.
            if each[0] in hung or self.restarts - before > MOST_RESTARTS:
                made.append(("not run", ""))
                continue
            alone = self._try(name, count, [each], self.timeout)
            if alone is None:
                hung.add(each[0])
            made += alone or [("hangs", self.error)]
        return made

    def _try(
        self, name: str, count: int, cases: list[Case], seconds: float
    ) -> list[tuple[str, str]] | None:
        """The worst outcome of any rank in each case; None if one hung."""
        try:
            by_rank = self.pool.run(
                run_cases, name, count, cases, self.who, self.grid, timeout=seconds
            )
        except RankError as error:
            self.error = str(error)[:600]
            self.restart()
            return None
        by_case = list(zip(*by_rank, strict=True))
        lost = any(_is_lost(message) for found in by_case for _, message in found)
        apart = any(0 < sum(o == "raises" for o, _ in found) < len(found) for found in by_case)
        if lost or apart:  # some may have left others waiting
            self.error = "a collective timed out"
            self.restart()
            if lost or len(cases) > 1:
                return None
        return [max(found, key=lambda each: OUTCOMES.index(each[0])) for found in by_case]


def _is_lost(message: str) -> bool:
    return "Timed out" in message or "pair closure" in message


def sweep(name: str, sides: list[Side], count: int) -> list[dict[str, Any]]:
    """Every case of one operator on every side."""
    rows: list[dict[str, Any]] = []
    for side in sides:
        planned = side.pool.run(plan, name, count, side.grid, timeout=300)[0]
        outcomes = side.run(name, count, [(i, how, mode) for i, _, how, mode, _ in planned])
        forward = {
            (index, layout): outcome
            for (index, layout, _, mode, _), (outcome, _) in zip(planned, outcomes, strict=True)
            if mode == "forward"
        }
        for case, (outcome, message) in zip(planned, outcomes, strict=True):
            index, layout, _, mode, even = case
            # If forward is not right, its gradient tells nothing more.
            if mode != "forward" and forward[index, layout] != "right":
                continue
            row = dict(side=side.who, mode=mode, even=even, outcome=outcome)
            if outcome != "right":
                row |= dict(layout=layout, message=message)
            rows.append(row)
    return rows


def summary(name: str, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """One line of the file: the counts, and the cases that were not right."""
    counts: Counter = Counter(
        f"{r['side']}/{r['mode']}/{'even' if r['even'] else 'uneven'}/{r['outcome']}" for r in rows
    )
    bad = [{k: v for k, v in r.items() if k != "even"} for r in rows if r["outcome"] != "right"]
    return dict(op=name, seconds=round(seconds, 1), counts=counts, bad=bad)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The operators that are done: {operator: its line}."""
    if not path.exists():
        return {}
    return {line["op"]: line for line in map(json.loads, path.read_text().splitlines())}


# -- reports ---------------------------------------------------------------------------------------


def totals(lines: dict[str, dict[str, Any]], side: str, mode: str) -> Counter:
    """How many cases of a side and mode ended how."""
    found: Counter = Counter()
    for line in lines.values():
        for key, n in line["counts"].items():
            who, what, evenness, outcome = key.split("/")
            if (who, what) == (side, mode):
                found[outcome] += n
                found[evenness, outcome] += n
    return found


def names(lines: dict[str, dict[str, Any]], side: str, mode: str, outcome: str) -> list[str]:
    """Operators with such a case."""
    return sorted(
        op
        for op, line in lines.items()
        if any((b["side"], b["mode"], b["outcome"]) == (side, mode, outcome) for b in line["bad"])
    )


def ran(lines: dict[str, dict[str, Any]]) -> list[str]:
    """The sides that ran."""
    return sorted(
        {key.split("/")[0] for line in lines.values() for key in line["counts"]}, reverse=True
    )


def show(title: str, lines: dict[str, dict[str, Any]]) -> str:
    """The markdown of one run."""
    text = [f"## {title}: {len(lines)} operators", ""]
    text += [
        "| | cases | correct | correct of uneven splits | raises | wrong | hangs | "
        "not run after hangs | operators correct in all cases |"
    ]
    text += ["| --- " * 9 + "|"]
    for side in ran(lines):
        for mode in MODES:
            n = totals(lines, side, mode)
            cases = sum(n[o] for o in OUTCOMES)
            uneven = sum(n["uneven", o] for o in OUTCOMES)
            bad = {op for o in OUTCOMES[1:] for op in names(lines, side, mode, o)}
            have = sum(
                any(k.startswith(f"{side}/{mode}/") for k in v["counts"]) for v in lines.values()
            )
            text.append(
                f"| {side} {mode} | {cases} | {_percent(n['right'], cases)} | "
                f"{_percent(n['uneven', 'right'], uneven)} | {n['raises']} | {n['wrong']} | "
                f"{n['hangs']} | {n['not run']} | {have - len(bad)} of {have} |"
            )
    text.append("")
    for side in ran(lines):
        for mode in MODES:
            for outcome in OUTCOMES[1:-1]:
                found = names(lines, side, mode, outcome)
                if found:
                    text += [
                        f"**{side}, {mode}, {outcome}** ({len(found)}): {', '.join(found)}",
                        "",
                    ]
    return "\n".join(text)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


HEAD = """# Coverage of PyTorch's operator database

Written {date} by `python benchmarks/op_coverage.py --table docs/coverage.md` from the runs
`python benchmarks/op_coverage.py --ranks N [--every K]` (torch {torch}, CPU, gloo). This library
("ours") and DTensor run on the same samples. The docstring of that file describes their layouts and
how results are compared. Each operator has {samples} samples, of float32, or of int64 or bool if it
accepts no floats; a case is a sample under one layout. A case that is not correct in forward is not
run in other modes. Random operators give other numbers than torch's by design, so their numbers are
not compared.
"""


def write_table(target: Path, out: Path, samples: int) -> None:
    """All runs under ``out`` as one page."""
    parts = [HEAD.format(date=date.today(), torch=torch.__version__, samples=samples)]
    for path in sorted(out.glob("coverage_*.jsonl")):
        parts.append(show(f"{path.stem.removeprefix('coverage_')} ranks", read(path)))
    target.write_text("\n".join(parts))


# -- running ---------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2", help="2, 3, or a grid such as 2x2")
    parser.add_argument("--ops", default="", help="regular expression of operator names")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="only every k-th operator")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--out", default="out", help="folder for finished work")
    parser.add_argument("--fresh", action="store_true", help="forget finished work")
    parser.add_argument("--timeout", type=float, default=15, help="seconds that a case may take")
    parser.add_argument("--table", default="", help="only write the page of all runs")
    options = parser.parse_args()
    out = Path(options.out)
    if options.table:
        write_table(Path(options.table), out, options.samples)
        return
    grid = tuple(map(int, options.ranks.split("x")))
    chosen = [n for n in operators() if re.search(options.ops, n)][:: options.every]
    path = out / f"coverage_{options.ranks}.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        path.unlink(missing_ok=True)
    done = read(path)
    who = ["ours"] if options.ours_only else ["ours", "DTensor"]
    os.environ["PYTHONHASHSEED"] = "0"  # sets give the same order on all ranks
    sides = [Side(w, grid, options.timeout) for w in who]
    started = time.monotonic()
    for name in chosen:
        if name in done:
            continue
        begun = time.monotonic()
        line = summary(name, sweep(name, sides, options.samples), time.monotonic() - begun)
        done[name] = line
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for bad in line["bad"]:
            if bad["side"] == "ours":
                what = f"{name} | {bad['mode']} | {bad['outcome']} | {bad['layout']}"
                print(f"{what}: {bad['message'][:200]}", flush=True)
    print(show(f"{options.ranks} ranks", {n: done[n] for n in chosen}))
    print(f"{time.monotonic() - started:.0f} s")
    for side in sides:
        side.pool.close()


if __name__ == "__main__":
    main()
