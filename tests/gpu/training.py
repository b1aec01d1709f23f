"""Training on all ranks has the losses of training on the first of them alone.

The main job's LeNet (examples/mnist_lenet.py) and a small GPT (benchmarks/gpt.py) under three
plans, in float64.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import consistent
from benchmarks.gpt import COLUMNS_AND_ROWS, GPT, batch, stepper
from consistent.flow.data import Digits, load
from consistent.spec import B, Placement, S, Sbp
from tests.gpu.world import World, start
from tests.scripts import module_of

LENET = Path(__file__).parents[2] / "examples" / "mnist_lenet.py"
IMAGES, STEPS, LAYERS = 256, 3, 2
CLOSE = 1e-10
PLANS: dict[str, tuple[dict[str, int], Sbp]] = {
    "batch split": ({}, S(0)),
    "batch and parameters split": ({"*": 0}, S(0)),
    "columns and rows split": (COLUMNS_AND_ROWS, B),
}


def compare(world: World, name: str, losses: list[float], alone: list[float], room: float) -> None:
    world.say(f"{name}: losses {', '.join(f'{each:.4f}' for each in losses)}")
    world.expect(alone[-1] < alone[0], f"{name}: nothing is learnt alone, {alone}")
    world.close(torch.tensor(losses).double(), torch.tensor(alone).double(), room, name)


def lenet(world: World, everywhere: Placement, first: Placement) -> None:
    """One epoch over a part of the digits; convolutions, dropout, a split layer."""
    job, digits = module_of(LENET), load()
    few = Digits(digits[0][:IMAGES], digits[1][:IMAGES], digits[2][:IMAGES], digits[3][:IMAGES])
    asked = argparse.Namespace(seed=0, epochs=1, batch=32, lr=1e-3)
    runs = [job.train(few, placement, asked, "LeNet") for placement in (everywhere, first)]
    compare(world, "LeNet", runs[0].losses, runs[1].losses, CLOSE)
    share = [torch.tensor(run.accuracy) for run in runs]
    world.close(share[0], share[1], 0, "LeNet, share of digits named rightly")


def gpt(placement: Placement, plan: dict[str, Sbp] | str, split: Sbp, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = consistent.parallelize(GPT(), placement, plan)
    step = stepper(model, *(consistent.distribute(x, placement, split) for x in batch()))
    return [step() for _ in range(steps)]


def main() -> None:
    world = start(__doc__)
    torch.set_default_dtype(torch.float64)
    GPT.layers = LAYERS
    everywhere, first = (Placement(world.device, range(n)) for n in (world.size, 1))
    lenet(world, everywhere, first)
    alone = gpt(first, {}, B, STEPS)
    for name, (plan, split) in PLANS.items():
        sbps = {name: S(dim) for name, dim in plan.items()}
        compare(world, f"GPT, {name}", gpt(everywhere, sbps, split, STEPS), alone, CLOSE)
    world.end()


if __name__ == "__main__":
    main()
