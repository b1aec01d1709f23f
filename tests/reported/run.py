"""Runs all reports on one pool of ranks, and says how each ended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.ranks import pool

from . import losses, models, reductions, shared, stages, views
from .report import REPORTS, SAME, Report
from .worlds import Here, There, World, difference, values

RANKS = 2
MODULES = (reductions, views, losses, models, shared, stages)  # they enter their reports


@dataclass(frozen=True)
class Outcome:
    """How a report's program ended; "" is: with the values of one process.

    Args:
        there: None where it did not run there.
        alone: an error of the program itself.
    """

    here: str
    there: str | None
    alone: str = ""


def outcome(entry: Report) -> Outcome:
    """On this rank."""
    right = values(World(), entry.program)
    if isinstance(right, str):
        return Outcome("", None, right)
    here = difference(values(Here(), entry.program), right)
    if entry.there is None:
        return Outcome(here, None)
    program = entry.program if entry.there == SAME else entry.there
    return Outcome(here, difference(values(There(), program), right))


def _on_rank(rank: int, name: str) -> Outcome:
    (entry,) = (each for each in REPORTS if each.name == name)
    return outcome(entry)


@cache
def outcomes() -> dict[str, list[Outcome]]:
    """The name of each report -> how it ended on each rank."""
    return {each.name: pool(RANKS).run(_on_rank, each.name) for each in REPORTS}
