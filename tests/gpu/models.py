"""Unmodified models under each plan: loss, gradients and the loss after a step are those of one
process. In the model's own dtype, and in float32, where attention is a fused op of CUDA."""

from __future__ import annotations

import time

import torch

from consistent.spec import Placement
from tests.gpu.world import World, start
from tests.models.architectures import MODELS
from tests.models.steps import allowed, alone, under, worst

# (plan, whether each rank passes its part of the batch, dtype unless it is the model's own)
RUNS = (
    ("zero3", True, None),
    ("context", False, None),
    ("data", True, torch.float32),
    ("tensor", False, torch.float32),
)
CLOSE = 2e-3  # in float32; where it is not a model's own, what rounding may make is not counted


def compare(world: World, name: str) -> None:
    placement = Placement(world.device, range(world.size))
    for plan, part, dtype in RUNS:
        what = f"{name}, {plan}, {dtype or 'its own dtype'}"
        try:
            wanted = alone(name, world.device, dtype)
            _, found = under(name, plan, placement, part, dtype=dtype, device=world.device)
        except Exception as error:  # noqa: BLE001 - the other models are still of interest
            said = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
            world.expect(False, f"{what}: {said}")
            continue
        if dtype is None:
            (where, gap), close = worst(found, wanted), allowed(name)
        else:
            grads = [x for key, x in wanted.items() if key.startswith("grad") and x is not None]
            largest = max(float(x.abs().max()) for x in grads)
            (where, gap), close = worst(found, wanted, 1e-2 * largest), CLOSE
        world.expect(gap < close, f"{what}: {where} is {gap:.1e} apart")


def main() -> None:
    world = start(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name in list(MODELS)[world.part]:
        began, before = time.perf_counter(), len(world.faults)
        compare(world, name)
        bad = len(world.faults) - before
        world.say(f"{name}: {bad} wrong, {time.perf_counter() - began:.1f} s")
    world.end()


if __name__ == "__main__":
    main()
