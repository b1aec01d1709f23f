"""Ranks have a program together, or none has one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks
from tests.twins import randn

# What rank 1 finds, and what the others say.
ALONE = {
    "refused": ("the step returns a set, which a program cannot make again", "could not record"),
    "unsettled": ("each call of the step changes kept", "on another rank each call changes"),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("alone", ALONE)
def test_where_one_rank_has_no_program_none_has_one(rank: int, alone: str) -> None:
    kept = {"n": 0}

    def step(x: Any) -> Any:
        whole = x.to_global(sbp=B) * 2
        if rank == 1 and alone == "unsettled":
            kept["n"] += 1
        return whole, {1} if rank == 1 and alone == "refused" else 1

    x: Any = consistent.distribute(randn(7, 4, seed=0), Placement.all("cpu"), S(0))
    wanted = x.full() * 2
    for options in (
        {},
        {"memory": 0, "fuse": True, "overlap": True},
    ):  # passes that decide together
        made: Any = consistent.compile(step, backend="ops", **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(6):
                torch.testing.assert_close(made(x)[0].full(), wanted)
        (program,) = made.programs
        assert program.program is None and ALONE[alone][rank != 1] in program.why, program.why
        assert sum(program.why in str(each.message) for each in said) == 1
