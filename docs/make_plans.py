"""Makes the pictures of docs/planning.md: `python docs/make_plans.py`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import consistent
from benchmarks.published import GPT, LENGTH, loss
from consistent.auto.machines.find import machine
from consistent.auto.pictures import MemoryPicture, StepPicture

FOLDER = Path(__file__).parent / "pictures"
LAYERS, WIDTH, HEADS, RANKS, BATCH, MACHINE = 48, 12288, 96, 64, 64, "a100-8"


def main() -> None:
    with torch.device("meta"):
        model = GPT(LAYERS, WIDTH, HEADS, again=False).to(torch.bfloat16)
        tokens = torch.empty(BATCH, LENGTH, dtype=torch.long)
    optimizer = functools.partial(torch.optim.AdamW, fused=True)
    found = consistent.search(
        model, RANKS, tokens, loss=loss, target=tokens, machine=MACHINE, optimizer=optimizer
    )
    print(found)
    found.picture().save(FOLDER / "plan_costs.svg")
    # Of those that were simulated, the fastest one in stages: it has the most to show.
    whole = [t for t in found.tried if t.report is not None]
    shown = next((t for t in whole if t.choice.stages > 1), whole[0])
    assert shown.report is not None
    print(shown)
    StepPicture(shown.report.timeline).save(FOLDER / "plan_step.svg")
    memory = machine(MACHINE).memory_bytes
    MemoryPicture(shown.report.peaks, memory).save(FOLDER / "plan_memory.svg")


if __name__ == "__main__":
    main()
