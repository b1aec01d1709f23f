"""Lists signatures that hold on the examples and are not claimed: `python -m
tests.consistent.rules.missing reduce`."""

from __future__ import annotations

import importlib
import sys
import warnings

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.rules import find_row
from tests.brute_force import missing


def main() -> None:
    warnings.simplefilter("ignore")
    for family in sys.argv[1:]:
        by_row: dict[str, dict[str, str]] = {}
        examples = importlib.import_module(f"tests.consistent.rules.examples.{family}").EXAMPLES
        for case in examples:
            row = find_row(resolve(case.func).name)
            assert row is not None
            for signature in missing(case.func, *case.args, **case.kwargs):
                by_row.setdefault(row.names, {}).setdefault(str(signature), str(case))
        for names, found in by_row.items():
            print(names)
            for signature, case in found.items():
                print(f"  {signature:40} {case}")


if __name__ == "__main__":
    main()
