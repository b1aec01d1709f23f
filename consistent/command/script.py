"""``python -m consistent explain FILE``: runs a script and reports what its global tensors did."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from ..report import report


def main(words: list[str]) -> int:
    """Run the script of ``explain``, and print the report on the first rank.

    It is printed even if the script raises; the error is then raised again. ``words`` are options,
    the file, and arguments of the script.
    """
    parser = argparse.ArgumentParser(
        prog="python -m consistent explain",
        description="Run a script and print what its global tensors did.",
    )
    parser.add_argument("--html", metavar="PATH", help="write the report as a page too")
    parser.add_argument("--trace", metavar="PATH", help="take times, and write them for Perfetto")
    parser.add_argument("file", metavar="FILE", help="the script")
    rest = parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    rest.required = False
    given = parser.parse_args(words)
    if not Path(given.file).is_file():
        parser.error(
            f"{given.file!r} is not a file. Give the path of a Python script, then its arguments."
        )
    before, path = sys.argv, sys.path[0]
    sys.argv = [given.file, *given.arguments]
    # As Python does for a script.
    sys.path[0] = str(Path(given.file).resolve().parent)
    with report(timeline=bool(given.trace or given.html)) as made:
        try:
            runpy.run_path(given.file, run_name="__main__")
        finally:
            sys.argv, sys.path[0] = before, path
            if os.environ.get("RANK", "0") == "0":
                print(made)
                print(made.summary())
                if given.html:
                    print(f"page: {made.save(given.html)}")
                if given.trace:
                    print(f"trace: {made.save_trace(given.trace)}")
    return 0
