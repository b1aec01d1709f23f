"""Compiled training steps have the losses and parameters of the step as it is written, with CUDA
graphs and without, messages fused with the ops beside them, or sent beside ops, and not.

On one rank of a GPU the time of a step is printed, too, beside that of torch.compile. On the CPU a
stand-in captures, so that the same code runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import consistent
from benchmarks.device_time import wait
from consistent.compiled import cuda_graphs
from consistent.spec import B, Placement, S
from tests.consistent.compiled.recorded_graphs import RecordedGraphs
from tests.gpu.world import World, start

CLOSE, STEPS, ROWS, WIDE, ROUNDS = 1e-10, 6, 24, 64, 30
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "with graphs": {"cuda_graph": True},
    "fused": {"fuse": True},
    "fused, with graphs": {"fuse": True, "cuda_graph": True},
    "messages beside ops": {"overlap": True},
}


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(wide), nn.Dropout(0.25)
        self.up, self.down = nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def model_of(wide: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(wide) for _ in range(3))).to(device)


def trained(world: World, plan: str, how: dict[str, Any] | None) -> tuple[list[float], list]:
    """(losses, parameters) after some steps; of the step as it is written if ``how`` is None."""
    placement = Placement(world.device, range(world.size))
    model = consistent.parallelize(model_of(WIDE, world.device), placement, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run: Any = step
    if how is not None:
        backend = "inductor" if world.device == "cuda" else "ops"
        run = consistent.compile(step, backend=backend, fullgraph=True, **how)
    torch.manual_seed(1)
    losses = []
    for i in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.9**i
        whole = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(i))
        x = consistent.distribute(whole, placement, B if plan == "tensor" else S(0))
        losses.append(run(x).item())
    return losses, [p.detach().full() for p in model.parameters()]  # type: ignore[attr-defined]


def compare(world: World) -> None:
    for plan in ("data", "zero3", "tensor"):
        losses, parameters = trained(world, plan, None)
        for name, how in WAYS.items():
            found = trained(world, plan, how)
            what = f"{plan}, {name}"
            wanted = torch.tensor(losses).double()
            world.close(torch.tensor(found[0]).double(), wanted, CLOSE, what)
            for made, right in zip(found[1], parameters, strict=True):
                world.close(made, right, CLOSE, f"{what}, a parameter")
        world.say(f"{plan}: losses {', '.join(f'{each:.4f}' for each in losses)}")


def times(world: World) -> None:
    """Seconds of a step, in turn in one run, in float32."""
    torch.set_default_dtype(torch.float32)
    x = torch.randn(512, 1024, device=world.device)
    ways: dict[str, Callable[[], Any]] = {}
    for name in ("as written", "torch.compile", "compiled", "with graphs"):
        model = model_of(1024, world.device)
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        run: Any = torch.compile(model) if name == "torch.compile" else model

        def step(x: Any, run: Any = run, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if name in WAYS:
            step = consistent.compile(step, fullgraph=True, **WAYS[name])
        ways[name] = lambda step=step: step(x)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            wait(world.device)
            began = time.perf_counter()
            way()
            wait(world.device)
            taken[name].append(time.perf_counter() - began)
    for name, each in taken.items():
        world.say(f"{name:16}{statistics.median(each[10:]) * 1e3:9.3f} ms a step")


def main() -> None:
    world = start(__doc__)
    torch.set_default_dtype(torch.float64)
    if world.device == "cpu":
        cuda_graphs.capturer = RecordedGraphs
    compare(world)
    if world.device == "cpu":
        world.expect("replay" in RecordedGraphs.done, "nothing was replayed")
    elif world.size == 1:
        times(world)
    world.end()


if __name__ == "__main__":
    main()
