"""What ranks tell each other about a step: which program they run, and what they have recorded."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mirrored.transports.default import current

from .program import Program

FAILED = "failed"


def least_and_most(number: int) -> tuple[int, int]:
    """The least and the largest ``number`` of all ranks, by one message of 8 bytes."""
    transport = current()
    if transport.size == 1:
        return number, number
    mine = torch.tensor([-number, number], dtype=torch.int32, device="cpu")
    least, most = transport.all_reduce(mine, tuple(range(transport.size)), "max").tolist()
    return -least, most


def sent(program: Program | None) -> Any:
    """What ranks compare of a program."""
    if program is None:
        return FAILED
    return [(call.kind, call.op, call.ranks, call.gathered) for call in program.messages()]


def no_program(name: str) -> str:
    """Why no rank has a program of the step ``name``."""
    return f"{name}: ranks could not record the step, or recorded other messages."


def fit_together(every: list[Any]) -> bool:
    """Whether every two ranks have the same messages to send each other."""
    if FAILED in every:
        return False
    for a, b in itertools.combinations(range(len(every)), 2):
        both = [[m for m in every[r] if a in m[2] and b in m[2]] for r in (a, b)]
        if both[0] != both[1]:
            return False
    return True
