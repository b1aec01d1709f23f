"""Agreement of the ranks on a compiled step: which program they run, and whether the messages that
they recorded match."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mirrored.transports.default import current

from .program import Program

FAILED = "failed"


def least_and_most(number: int) -> tuple[int, int]:
    """Return the least and the largest ``number`` over all ranks, by one all-reduce of 8 bytes.

    Ranks agree if both are equal.
    """
    transport = current()
    if transport.size == 1:
        return number, number
    # The maximum of -number is minus the least number, so one all-reduce gives both.
    mine = torch.tensor([-number, number], dtype=torch.int32, device="cpu")
    least, most = transport.all_reduce(mine, tuple(range(transport.size)), "max").tolist()
    return -least, most


def sent(program: Program | None) -> Any:
    """Return a description of the messages that a program sends, which ranks gather and compare
    (``fit_together``).

    Return ``FAILED`` if there is no program.
    """
    if program is None:
        return FAILED
    return [(call.kind, call.op, call.ranks, call.gathered) for call in program.messages()]


def no_program(name: str) -> str:
    """Return the message to the user that ranks could not record the step ``name``, or recorded
    different messages."""
    return f"{name}: ranks could not record the step, or recorded other messages."


def fit_together(every: list[Any]) -> bool:
    """Return whether the programs of all ranks can run together without a deadlock.

    That is the case if any two ranks send each other the same messages in the same order. ``every``
    holds the result of ``sent`` on each rank.
    """
    if FAILED in every:
        return False
    for a, b in itertools.combinations(range(len(every)), 2):
        both = [[m for m in every[r] if a in m[2] and b in m[2]] for r in (a, b)]
        if both[0] != both[1]:
            return False
    return True
