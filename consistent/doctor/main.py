"""Main program of the doctor: reads the arguments, runs the checks, and prints the findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import installation, machine, network, self_test
from .finding import Finding

USAGE = """\
usage: python -m consistent doctor [--json]

Looks at the installation, the machine and the network, then lets two ranks try a gather, a
reduction, a gradient and a checkpoint. Below each line that is not well it says what to do.
Exit status: 0 all is well, 1 something is to be done, 2 the ranks failed.
"""

Check = Callable[[], Iterable[Finding]]

CHECKS: dict[str, Sequence[Check]] = {
    "installation": installation.CHECKS,
    "machine": machine.CHECKS,
    "network": network.CHECKS,
    "two ranks": (self_test.check,),
}


def main(words: Sequence[str]) -> int:
    """Run all checks and print the findings; return the exit status (``exit_status``).

    ``words`` are the command's arguments: none, or ``--json`` to print JSON.
    """
    if words and words != ["--json"]:
        wants_help = words[0] in ("-h", "--help")
        print(USAGE, end="", file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    findings: dict[str, list[Finding]] = {}
    for title, checks in CHECKS.items():
        findings[title] = list(_run_checks(checks))
        if not words:
            _print_section(title, findings[title])
    if words:
        print(json.dumps({t: [vars(f) for f in each] for t, each in findings.items()}, indent=2))
    return exit_status(findings)


def exit_status(findings: dict[str, list[Finding]]) -> int:
    """Return the exit status for ``findings``, the findings of each section.

    It is 0 if all is well, 1 if there is something to do, 2 if the self-test of two ranks failed.
    """
    if any(finding.is_to_do for finding in findings["two ranks"]):
        return 2
    return int(any(finding.is_to_do for each in findings.values() for finding in each))


def _run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield the findings of the checks.

    A check that raises becomes a finding itself, and does not prevent the others from running.
    """
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(
                f"{check.__name__} of the doctor itself failed: {type(error).__name__}: {error}",
                "Report it, with this output: it is a fault of this program.",
            )


def _print_section(title: str, findings: list[Finding]) -> None:
    print(title)
    for finding in findings:
        mark = "TO DO" if finding.is_to_do else "maybe" if finding.cure else "well "
        print(f"  {mark}  {finding.said}")
        if finding.cure:
            print(f"         -> {finding.cure}")
    print(flush=True)
