"""``python -m consistent verify FILE``: checks a training step under plans against one process."""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from pathlib import Path
from typing import Any

NAMES = "consistent.verify"


def main(words: list[str]) -> int:
    """Check that the function ``step`` of a file computes the same numbers under each plan.

    ``words`` are options and the file. Return 0 if all numbers agree with a run on one process,
    else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m consistent verify",
        description="Hold the step of a file against one process: step(place), and if they are "
        "there plans, programs, ranks, grid and batch, as consistent.verify takes them.",
    )
    parser.add_argument("--plan", action="append", metavar="PLAN", help="a plan; may be repeated")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes for each plan")
    parser.add_argument("--html", metavar="PATH", help="write what was found as a page too")
    parser.add_argument("file", metavar="FILE", help="the program; it is not run as __main__")
    args = parser.parse_args(words)
    if not Path(args.file).is_file():
        parser.error(f"{args.file!r} is not a file. Give the path of a Python file.")
    sys.path.insert(0, str(Path(args.file).resolve().parent))
    # Not as __main__, so that the file's own training does not run.
    module = runpy.run_path(args.file, run_name=NAMES)
    if not callable(module.get("step")):
        parser.error(
            f"{args.file} defines no function `step`. Write step(place), which builds the model, "
            "wraps it in place(model) and trains it a step."
        )
    from ..verification import verify

    options: dict[str, Any] = {
        name: module[name] for name in ("programs", "ranks", "grid", "batch") if name in module
    }
    if args.ranks:
        options["ranks"] = args.ranks
    plans = [_parse_plan(arg) for arg in args.plan or ()] or module.get("plans", ["data", "zero3"])
    result = verify(module["step"], plans, **options)
    print(result)
    if args.html:
        print(f"page: {result.save(args.html)}")
    return 0 if result.ok else 1


def _parse_plan(text: str) -> Any:
    """Return a parallelization plan from its text on the command line.

    The text is a name such as ``data``, or a Python dictionary with a plan for each axis of the
    placement.
    """
    return ast.literal_eval(text) if text.startswith("{") else text
