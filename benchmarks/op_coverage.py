"""Is every op right under every split? PyTorch's operator database, ours and DTensor on the same
samples in one run.

    python benchmarks/op_coverage.py --ranks 2                       all operators
    python benchmarks/op_coverage.py --ranks 2x2 --every 8           every 8th, on two axes
    python benchmarks/op_coverage.py --ranks 3 --ops 'softmax|matmul' --samples 6 --ours-only
    python benchmarks/op_coverage.py --table docs/coverage.md        the table of all runs so far

Inputs are laid out as B, S(d) for every d, even or not, and P (random addends): the first tensor
alone, the second alone, and all that can be. Forward, backward and in place are compared with plain
torch on the whole tensors. Each case ends as right, raises, wrong or hangs; a hang costs its side
new processes, and the operator goes on with its next sample. What is done stands in --out, and a
run that is started again goes on from there.
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

from benchmarks.coverage_cases import MODES, Grid, case, get_ready, operators, plan
from tests.ranks import Pool, RankError

OUTCOMES = ("right", "raises", "wrong", "hangs")


class Side:
    """One side's ranks, which a hang of the other side's leaves alone."""

    def __init__(self, who: str, grid: Grid, timeout: float) -> None:
        self.who, self.grid, self.timeout = who, grid, timeout
        self.pool = Pool(torch.Size(grid).numel())
        self.restart()

    def restart(self) -> None:
        """New processes."""
        self.pool.close()
        self.pool.run(get_ready, self.who, self.grid, timeout=300)

    def run(self, name: str, count: int, index: int, how: Any, mode: str) -> tuple[str, str]:
        """(outcome, message) of one case: the worst that a rank met."""
        try:
            found = self.pool.run(
                case, name, count, index, how, mode, self.who, self.grid, timeout=self.timeout
            )
        except RankError as error:
            self.restart()
            return "hangs", str(error)[:600]
        outcomes = {outcome for outcome, _ in found}
        worst = max(found, key=lambda each: OUTCOMES.index(each[0]))
        lost = any("Timed out" in message or "pair closure" in message for _, message in found)
        if lost or len(outcomes) > 1:  # ranks went different ways: some may wait for others
            self.restart()
        return ("hangs", worst[1]) if lost else worst


def sweep(name: str, sides: list[Side], count: int) -> list[dict[str, Any]]:
    """Every case of one operator on every side."""
    rows: list[dict[str, Any]] = []
    for side in sides:
        hung: set[int] = set()
        cases = side.pool.run(plan, name, count, side.grid, timeout=300)[0]
        forward: dict[tuple[int, str], str] = {}
        for index, layout, how, mode, even in cases:
            # A gradient of what is not right forward says nothing more; a sample that hangs would
            # hang again.
            if index in hung or (mode != "forward" and forward.get((index, layout)) != "right"):
                continue
            outcome, message = side.run(name, count, index, how, mode)
            if mode == "forward":
                forward[index, layout] = outcome
            if outcome == "hangs":
                hung.add(index)
            row = dict(side=side.who, mode=mode, even=even, outcome=outcome)
            if outcome != "right":
                row |= dict(layout=layout, message=message)
            rows.append(row)
    return rows


def summary(name: str, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """One line of the file: counts, and what was not right."""
    counts: Counter = Counter(
        f"{r['side']}/{r['mode']}/{'even' if r['even'] else 'uneven'}/{r['outcome']}" for r in rows
    )
    bad = [{k: v for k, v in r.items() if k != "even"} for r in rows if r["outcome"] != "right"]
    return dict(op=name, seconds=round(seconds, 1), counts=counts, bad=bad)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What is done: {operator: its line}."""
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
        "| | cases | right | of uneven splits | raises | wrong | hangs | operators right in all |"
    ]
    text += ["| --- " * 8 + "|"]
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
                f"{n['hangs']} | {have - len(bad)} of {have} |"
            )
    text.append("")
    for side in ran(lines):
        for mode in MODES:
            for outcome in OUTCOMES[1:]:
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
`python benchmarks/op_coverage.py --ranks N [--every K]` (torch {torch}, CPU, gloo): ours and
DTensor on the same samples, laid out and compared as the first lines of that file say. float32, or
int64 or bool where an operator takes no floats; {samples} samples each. A case that is not right
forward has no other modes. Numbers of random operators are others than torch's by design, and are
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
    parser.add_argument("--out", default="out", help="folder of what is done")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--timeout", type=float, default=15, help="seconds a case may take")
    parser.add_argument("--table", default="", help="write the page of all runs, and end")
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
    os.environ["PYTHONHASHSEED"] = "0"  # some samples come out of sets: alike on all ranks
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
