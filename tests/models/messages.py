"""Counts the messages of a training step of each model under each plan, between 2 ranks that share
no memory, and those that the program waits for at once."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch

import consistent
from consistent import Placement
from mirrored.transports.counting import counting
from tests.mirrored.kinds import over_gloo
from tests.models.architectures import MODELS
from tests.models.steps import laid_out
from tests.ranks import pool

# Name in the table -> the plan, whether each rank passes its part of the batch, and `keep_bytes`:
# at 0 each module gathers its own parameters, as those of a large model do.
PLANS: dict[str, tuple[str, bool, int | None]] = {
    "data": ("data", True, None),
    "zero1": ("zero1", True, None),
    "zero3": ("zero3", True, None),
    "zero3 by module": ("zero3", True, 0),
    "tensor": ("tensor", False, None),
}
KEPT = Path(__file__).with_name("messages.csv")
Counts = dict[str, tuple[int, int]]  # plan -> (messages, those that are waited for at once)


def counted(rank: int, name: str) -> Counts:
    """The counts of ``name``, on a rank."""
    return {shown: _of_a_step(name, *given) for shown, given in PLANS.items()}


def _of_a_step(name: str, plan: str, part: bool, keep_bytes: int | None) -> tuple[int, int]:
    """The third step is like all that follow: what comes next is known from those before."""
    model, inputs = laid_out(name, plan, Placement("cpu", range(2)), part, keep_bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with consistent.plain_may_differ():  # comparing plain tensors is not part of a step
        for _ in range(3):
            with counting() as sent:
                optimizer.zero_grad()
                model(**inputs)["loss"].backward()
                optimizer.step()
    return len(sent.calls), sum(call.waits for call in sent.calls)


def kept() -> dict[str, Counts]:
    """The table: model -> its counts."""
    table: dict[str, Counts] = {}
    with KEPT.open(newline="") as file:
        for row in csv.DictReader(file):
            counts = int(row["messages"]), int(row["waited for"])
            table.setdefault(row["model"], {})[row["plan"]] = counts
    return table


def main() -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["model", "plan", "messages", "waited for"])
    for name in sorted(MODELS):
        first, second = pool(2).run(over_gloo, counted, name)
        assert first == second, (name, first, second)
        out.writerows([name, plan, *counts] for plan, counts in first.items())


if __name__ == "__main__":
    main()
