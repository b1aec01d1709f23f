"""A training on islands: ``program.py OPTIONS`` with a JSON object prints what came of it.

What a rank prints: losses of its island, parameters after the last step, bytes sent to others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import Placement, checkpoint

STEPS, ROWS = 8, 6


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches(island: int, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(steps):
        drawn = torch.Generator().manual_seed(100 * step + island)
        x = torch.randn(ROWS, 5, generator=drawn, dtype=torch.float64)
        yield x, torch.randint(3, (ROWS,), generator=drawn)


def outer_of(given: dict[str, Any]) -> Any:
    return lambda p: torch.optim.SGD(p, **given["outer"])


def train(given: dict[str, Any]) -> dict[str, Any]:
    islands = consistent.islands.join(given["islands"])
    placement = Placement.all("cpu")
    net = model()
    if islands.number:  # island 0's are taken by all
        nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    consistent.parallelize(net, placement, given["plan"])
    inner = getattr(torch.optim, given["inner"])(net.parameters(), lr=0.1)
    dtype = getattr(torch, given["dtype"]) if "dtype" in given else None
    outer = islands.outer(
        net, outer_of(given), every=given["every"], parts=given.get("parts", 1), dtype=dtype
    )
    losses, sent = [], outer.sent_bytes
    kept = {"net": net, "inner": inner, "outer": outer}
    first = given.get("resume", 0)
    if first:
        checkpoint.load(Path(given["folder"]) / str(islands.number), **kept)
    for step, (x, y) in enumerate(batches(islands.number)):
        if step < first:
            continue
        if step == given.get("save"):
            checkpoint.save(Path(given["folder"]) / str(islands.number), **kept)
        inner.zero_grad()
        x, y = (consistent.distribute(t, placement, consistent.S(0)) for t in (x, y))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        inner.step()
        outer.step()
        losses.append(loss.item())
    values = [p.detach().full().flatten().tolist() for p in net.parameters()]  # type: ignore
    return {"losses": losses, "values": values, "sent": outer.sent_bytes - sent}


def alone(given: dict[str, Any]) -> dict[str, Any]:
    """The same in plain torch: islands by turns, in one process."""
    count, every, parts = given["islands"], given["every"], given.get("parts", 1)
    nets = [model() for _ in range(count)]
    inners = [getattr(torch.optim, given["inner"])(n.parameters(), lr=0.1) for n in nets]
    starts = [nn.Parameter(p.detach().clone()) for p in nets[0].parameters()]
    outer = outer_of(given)(starts)
    data, losses = [list(batches(k)) for k in range(count)], [[] for _ in range(count)]
    total, seen, part_of = sum(p.numel() for p in starts), 0, []
    for p in starts:
        part_of.append(min(parts - 1, seen * parts // total))
        seen += p.numel()
    for step in range(STEPS):
        for k, (net, inner) in enumerate(zip(nets, inners, strict=True)):
            inner.zero_grad()
            loss = F.cross_entropy(net(data[k][step][0]), data[k][step][1])
            loss.backward()
            inner.step()
            losses[k].append(loss.item())
        for part in range(parts):
            if (step + 1) % every != every * (part + 1) // parts % every:
                continue
            for i, start in enumerate(starts):
                ours = [list(net.parameters())[i].detach() for net in nets]
                gap = sum(start.detach() - p for p in ours) / count
                start.grad = gap if part_of[i] == part else None
            outer.step()
            for net in nets:
                for i, p in enumerate(net.parameters()):
                    if part_of[i] == part:
                        p.data.copy_(starts[i].detach())
    values = [[p.flatten().tolist() for p in net.parameters()] for net in nets]
    return {"losses": losses, "values": values}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)
