"""A small GPT in stages, one on each rank or two, has under every schedule the losses and gradients
of one process. Ranks may share a GPU. On the CPU two schedules of a smaller one show that the
program runs: there tests/consistent/pipeline has the others."""

from __future__ import annotations

from typing import Any

import torch

from consistent.nn import pipeline
from consistent.pipeline.schedules import SCHEDULES
from consistent.spec import Placement
from tests.consistent.pipeline.gpt import GPT, batch, gradients, loss_of, trained
from tests.gpu.world import World, start

CLOSE, ROWS = 1e-9, 8
STEPS, BLOCKS = {"cuda": 3, "cpu": 2}, {"cuda": 8, "cpu": 4}


def compare(world: World, schedule: str, wanted: list[float], grads: dict[str, Any]) -> None:
    """Train under a schedule."""
    placements = [Placement(world.device, [rank]) for rank in range(world.size)]
    model = GPT(BLOCKS[world.device])
    pipe = pipeline(model, placements, loss=loss_of, micro_batches=8, schedule=schedule)
    optimizer = torch.optim.AdamW(pipe.model.parameters(), lr=0.01)
    losses = []
    for number in range(STEPS[world.device]):
        ids, target = (x.to(world.device) for x in batch(number, ROWS))
        optimizer.zero_grad()
        loss = pipe.step(ids, target)
        optimizer.step()
        losses.append(loss.item())
    world.close(torch.tensor(losses).double(), torch.tensor(wanted).double(), CLOSE, schedule)
    for name, grad in gradients(pipe.model).items():
        world.close(grad.full(), grads[name], CLOSE, f"{schedule}, gradient of {name}")
    world.say(f"{schedule}: losses {', '.join(f'{each:.4f}' for each in losses)}")


def main() -> None:
    world = start(__doc__)
    wanted, grads = trained(GPT(BLOCKS[world.device]), STEPS[world.device], ROWS)
    for schedule in SCHEDULES if world.device == "cuda" else list(SCHEDULES)[:2]:
        compare(world, schedule, wanted, grads)
    world.end()


if __name__ == "__main__":
    main()
