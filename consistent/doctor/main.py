"""Reads the words, runs the checks and prints what they found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence

from . import installation, machine, network, self_test
from .finding import Finding

USAGE = """\
usage: python -m consistent doctor [--json]

Looks at the installation, the machine and the network, then lets two ranks try a gather, a
reduction, a gradient and a checkpoint. Below each line that is not well it says what to do.
Exit status: 0 all is well, 1 something is to be done, 2 the ranks failed.
"""

CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "installation": installation.check,
    "machine": machine.check,
    "network": network.check,
    "two ranks": self_test.check,
}


def main(words: Sequence[str]) -> int:
    """Print it; gives the exit status."""
    if words and words != ["--json"]:
        asked = words[0] in ("-h", "--help")
        print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    found: dict[str, list[Finding]] = {}
    for title, check in CHECKS.items():
        found[title] = list(check())
        if not words:
            _print(title, found[title])
    if words:
        print(json.dumps({t: [vars(f) for f in each] for t, each in found.items()}, indent=2))
    return status(found)


def status(found: dict[str, list[Finding]]) -> int:
    """The exit status for what was found."""
    if any(finding.cure for finding in found["two ranks"]):
        return 2
    return int(any(finding.cure for each in found.values() for finding in each))


def _print(title: str, findings: list[Finding]) -> None:
    print(title)
    for finding in findings:
        print(f"  {'TO DO' if finding.cure else 'well '}  {finding.said}")
        if finding.cure:
            print(f"         -> {finding.cure}")
    print(flush=True)
