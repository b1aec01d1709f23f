"""A training on islands: ``program.py OPTIONS`` with a JSON object prints what came of it.

What a rank prints: losses of its island, parameters after the last step, bytes sent to others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import Placement, checkpoint
from consistent.islands import Islands, Outer

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


def outer_on(islands: Islands, net: nn.Module, given: dict[str, Any]) -> Outer:
    dtype = getattr(torch, given["dtype"]) if "dtype" in given else None
    every = given["every"] + (islands.number if given.get("differs") else 0)
    return islands.outer(
        net, outer_of(given), every=every, parts=given.get("parts", 1), dtype=dtype
    )


def refused(call: Callable[[], Any]) -> str:
    """The error that it raises; empty if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def train(given: dict[str, Any]) -> dict[str, Any]:
    wrong = given.get("wrong", ())
    errors = [refused(lambda: consistent.islands.join(3))] if wrong else []
    islands = consistent.islands.join(given["islands"])
    placement = Placement.all("cpu")
    net = model()
    errors += [refused(partial(outer_on, islands, net, each)) for each in wrong]
    if islands.number:  # island 0's are taken by all
        nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    consistent.parallelize(net, placement, given["plan"])
    inner = getattr(torch.optim, given["inner"])(net.parameters(), lr=0.1)
    outer = outer_on(islands, net, given)
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
    return {"losses": losses, "values": values, "sent": outer.sent_bytes - sent, "errors": errors}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)
