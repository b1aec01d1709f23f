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

    A compiled step calls this in each call, to find out whether all ranks are about to do the same:
    the two are then equal. Example: 2, 2, 0 on three ranks gives (0, 2) on each.
    """
    transport = current()
    if transport.size == 1:
        return number, number
    # The maximum of -number is minus the least number, so one all-reduce gives both.
    bounds = torch.tensor([-number, number], dtype=torch.int32, device="cpu")
    least, most = transport.all_reduce(bounds, tuple(range(transport.size)), "max").tolist()
    return -least, most


def message_signatures(program: Program | None) -> Any:
    """Return a list that describes the messages of ``program``, in order, for ``messages_match``.

    The ranks gather these lists after a recording. ``FAILED`` stands for a rank without a program.
    """
    if program is None:
        return FAILED
    return [(call.kind, call.op, call.ranks, call.gathered) for call in program.messages()]


def no_program_reason(name: str) -> str:
    """Return the reason that a rank gives if only other ranks fail to record the step ``name``.

    They could not record it, or recorded other messages than this rank.
    """
    return f"{name}: ranks could not record the step, or recorded other messages."


def messages_match(signatures_by_rank: list[Any]) -> bool:
    """Return whether the programs of all ranks can run together without a deadlock.

    They can if any two ranks have the same messages that both take part in, in the same order. For
    example, [A, B] on rank 0 and [B, A] on rank 1 would deadlock.

    Args:
        signatures_by_rank: for each rank, the list that ``message_signatures`` returned there.
    """
    if FAILED in signatures_by_rank:
        return False
    for a, b in itertools.combinations(range(len(signatures_by_rank)), 2):
        common_messages = [
            [m for m in signatures_by_rank[r] if a in m[2] and b in m[2]] for r in (a, b)
        ]
        if common_messages[0] != common_messages[1]:
            return False
    return True
