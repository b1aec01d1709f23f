"""A rank of an island that is launched by itself: ``alone.py OPTIONS`` with a JSON object.

It trains for so many steps, and prints after each the loss, the number of each part's last meeting,
and a number for the parameters; after the end, the parameters. ``waits`` and ``makes`` are files by
step: it waits for the one before it counts the step, and makes the other after that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import consistent
from consistent import Placement
from mirrored.transports.torch_dist.islands import IslandConnection
from tests.consistent.islands.program import batches, model, outer_on


def train(given: dict[str, Any]) -> None:
    islands = consistent.islands.join(
        given["count"], number=given["number"], endpoint=given["endpoint"], patience=2.0
    )
    placement = Placement.all("cpu")
    net = model()
    if given["plan"]:
        consistent.parallelize(net, placement, given["plan"])
    inner = getattr(torch.optim, given["inner"])(net.parameters(), lr=given["lr"])
    waits, makes = ({int(k): v for k, v in given.get(x, {}).items()} for x in ("waits", "makes"))
    folder, place = Path(given["folder"]), int(os.environ.get("RANK", "0"))

    def reached(step: int) -> None:
        if place == 0 and step in makes:
            (folder / makes[step]).touch()

    def wait(step: int) -> None:
        while step in waits and not (folder / waits[step]).exists():
            time.sleep(0.01)

    def values() -> list[Any]:
        found: list[Any] = [p.detach() for p in net.parameters()]
        return [x.full() for x in found] if given["plan"] else found

    def shown(loss: float) -> None:
        number = zlib.crc32(b"".join(x.contiguous().numpy().tobytes() for x in values()))
        print(json.dumps([loss, [part.met for part in outer._parts], number]), flush=True)

    reached(0)
    wait(0)
    outer = outer_on(islands, net, given)
    data = batches(islands.number, 1000)
    step = 0
    while outer.steps < given["steps"]:
        step += 1
        inner.zero_grad()
        x, y = next(data)
        if given["plan"]:
            x, y = (consistent.distribute(t, placement, consistent.S(0)) for t in (x, y))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        inner.step()
        wait(step)
        if step == given.get("dies") and place == given["place"]:
            # It has come to the meeting, and others send.
            IslandConnection.mean = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        outer.step()
        shown(loss.item())
        reached(step)
    outer.finish()
    shown(0.0)
    print(json.dumps([x.flatten().tolist() for x in values()]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(json.loads(sys.argv[1]))
