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
    args = parser.parse_args(words)
    if not Path(args.file).is_file():
        parser.error(
            f"{args.file!r} is not a file. Give the path of a Python script, then its arguments."
        )
    argv, path = sys.argv, sys.path[0]
    sys.argv = [args.file, *args.arguments]
    # As Python does for a script.
    sys.path[0] = str(Path(args.file).resolve().parent)
    with report(timeline=bool(args.trace or args.html)) as program_report:
        try:
            runpy.run_path(args.file, run_name="__main__")
        finally:
            sys.argv, sys.path[0] = argv, path
            if os.environ.get("RANK", "0") == "0":
                print(program_report)
                print(program_report.summary())
                if args.html:
                    print(f"page: {program_report.save(args.html)}")
                if args.trace:
                    print(f"trace: {program_report.save_trace(args.trace)}")
    return 0
