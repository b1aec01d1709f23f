"""Models of transformers with ``attn_implementation="flex_attention"``: a step under each plan is
that of one process with the model's own attention, of rows that are plain, padded, packed and
behind windows."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

from tests.gpu.world import World, start
from tests.models.steps import allowed
from tests.models.test_flex_attention import EVERY, compared


def compare(world: World, name: str, kind: str, plan: Any) -> None:
    found = compared(name, kind, plan, world.device)
    if found is not None:
        where, gap = found
        world.expect(gap < allowed(name), f"{name}, {kind}, {plan}: {where} is {gap:.1e} apart")


def main() -> None:
    warnings.filterwarnings("ignore")
    world = start(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name, kind, plan in EVERY[world.part]:
        began, before = time.perf_counter(), len(world.faults)
        try:
            compare(world, name, kind, plan)
        except Exception as error:  # noqa: BLE001 - the other models are still of interest
            said = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
            world.expect(False, f"{name}, {kind}, {plan}: {said}")
        bad, took = len(world.faults) - before, time.perf_counter() - began
        world.say(f"{name}, {kind}, {plan}: {bad} wrong, {took:.1f} s")
    world.end()


if __name__ == "__main__":
    main()
