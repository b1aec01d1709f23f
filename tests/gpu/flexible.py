"""Models of transformers with ``attn_implementation="flex_attention"``: a step under each plan is
that of one process with the model's own attention, of rows that are plain, padded, packed and
behind windows."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

import consistent
from consistent.spec import Placement, S
from tests.gpu.world import World, start
from tests.models.sequences import SEQUENCES
from tests.models.steps import allowed, step, worst
from tests.models.test_flex_attention import EVERY, REFUSED


def made(kind: str, name: str, device: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, inputs = SEQUENCES[kind](name)
    there = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    return model.eval().to(device), there


def compare(world: World, name: str, kind: str, plan: Any) -> None:
    placement = Placement(world.device, range(world.size))
    model, inputs = made(kind, name, world.device)
    if name in REFUSED or not getattr(model, "_supports_flex_attn", False):
        return
    wanted = step(*made(kind, name, world.device))
    model.set_attn_implementation("flex_attention")  # type: ignore[operator]
    model = consistent.parallelize(model, placement, plan)
    if plan in ("data", "zero3"):
        inputs = {
            k: consistent.distribute(x, placement, S(0)) if isinstance(x, torch.Tensor) else x
            for k, x in inputs.items()
        }
    found = step(model, inputs)
    whole = {key: x.full() if hasattr(x, "full") else x for key, x in found.items()}
    where, gap = worst(whole, wanted)
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
