"""PyTorch's operator database: every operator under every layout, forward, backward and in place,
equals plain torch on the same device (benchmarks/op_coverage.py, which does it on the CPU)."""

from __future__ import annotations

import random
import time
from collections import Counter

import torch.distributed as dist

from benchmarks.coverage_cases import operators, plan, run_cases, use
from tests.gpu.world import World, start

SAMPLES = 1
# What raises on the CPU as well, in words that say so (docs/coverage.md).
RAISE = frozenset(("as_strided", "as_strided.partial_views", "resize_"))


def compare(world: World, name: str) -> Counter[str]:
    """How often each outcome came."""
    grid = (world.size,)
    planned = plan(world.rank, name, SAMPLES, grid)
    cases = [(index, how, mode) for index, _, how, mode, _ in planned]
    own = run_cases(world.rank, name, SAMPLES, cases, "ours", grid)
    everyone: list[list[tuple[str, str]]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everyone, own)
    found: Counter[str] = Counter()
    for (_, layout, _, mode, _), *outcomes in zip(planned, *everyone, strict=True):
        bad = next((each for each in outcomes if each[0] != "right"), outcomes[0])
        found[bad[0]] += 1
        alike = len({outcome for outcome, _ in outcomes}) == 1
        good = bad[0] == "right" or (bad[0] == "raises" and alike and name in RAISE)
        if world.rank == 0:
            world.expect(good, f"{name}, {layout}, {mode}: {bad[0]} {bad[1]}")
    return found


def main() -> None:
    world = start(__doc__)
    use(world.device)
    names = sorted(operators())
    random.Random(0).shuffle(names)  # so that what is left out when time is up is of all kinds
    for name in names[world.part]:
        began = time.perf_counter()
        found = compare(world, name)
        world.say(f"{name}: {dict(found)}, {time.perf_counter() - began:.1f} s")
    world.end()


if __name__ == "__main__":
    main()
