"""Training with messages of fewer bytes: the losses are near those of one rank, and all ranks end
with the same bits.

A small GPT (benchmarks/gpt.py) in float32. Codecs round, so "near" is 2 % of the loss; of gradients
of rank 4, which go on with what they left out in later steps, half of it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import consistent
from benchmarks.gpt import GPT, batch, stepper
from consistent import data_parallel, zero3
from consistent.nn import Plan
from consistent.spec import B, Placement, S, Sbp
from tests.gpu.world import World, start

STEPS, LAYERS = 6, 2
CLOSE, CLOSE_OF_RANK_4 = 0.02, 0.5
PLANS: dict[str, Plan] = {
    "data, int8": data_parallel(reduce="int8"),
    "data, fp8": data_parallel(reduce="fp8"),
    "data, powersgd:4": data_parallel(reduce="powersgd:4"),
    "zero3, bf16": zero3(gather="bf16", reduce="bf16"),
    "zero3, int8": zero3(gather="int8", reduce="int8"),
    "zero3, fp8": zero3(gather="fp8", reduce="fp8"),
}


def trained(placement: Placement, plan: Plan | str, split: Sbp) -> tuple[list[float], torch.Tensor]:
    """The losses, and all parameters one behind the other."""
    torch.manual_seed(0)
    model = consistent.parallelize(GPT(), placement, plan)
    step = stepper(model, *(consistent.distribute(x, placement, split) for x in batch()))
    losses = [step() for _ in range(STEPS)]
    return losses, torch.cat([p.detach().full().flatten() for p in model.parameters()])


def compare(world: World, everywhere: Placement, first: Placement) -> None:
    alone = trained(first, "data", B)[0]
    world.expect(alone[-1] < alone[0], f"nothing is learnt alone, {alone}")
    for name, plan in PLANS.items():
        losses, parameters = trained(everywhere, plan, S(0))
        world.say(f"{name}: losses {', '.join(f'{each:.4f}' for each in losses)}")
        gap = max(abs(made - wanted) / wanted for made, wanted in zip(losses, alone, strict=True))
        room = CLOSE_OF_RANK_4 if "powersgd" in name else CLOSE
        world.expect(gap <= room, f"{name}: losses are {gap:.1%} apart, and {room:.0%} is allowed")
        bits = parameters.cpu().view(torch.int32)
        others = [torch.empty_like(bits) for _ in range(world.size)]
        dist.all_gather(others, bits)
        world.expect(all(map(bits.equal, others)), f"{name}: ranks have other parameters")


def main() -> None:
    world = start(__doc__)
    GPT.layers = LAYERS
    compare(world, *(Placement(world.device, range(n)) for n in (world.size, 1)))
    world.end()


if __name__ == "__main__":
    main()
