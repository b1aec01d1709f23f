"""An island of one rank that is launched by itself: ``alone.py OPTIONS`` with a JSON object.

It trains until there is a file ``stop``, and prints for each step whether it has met others and a
number for its parameters, and after the end the parameters.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import consistent
from mirrored.transports.torch_dist.islands import Line
from tests.consistent.islands.program import batches, model


def train(given: dict[str, Any]) -> None:
    islands = consistent.islands.join(
        given["count"], number=given["number"], endpoint=given["endpoint"], patience=2.0
    )
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = islands.outer(net, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5), every=2)
    stop = Path(given["folder"]) / "stop"
    for step, (x, y) in enumerate(batches(islands.number, 10_000), 1):
        if step == given.get("dies"):  # once it has come, while others send
            Line.mean = lambda *_: os._exit(1)  # type: ignore[assignment]
        inner.zero_grad()
        F.cross_entropy(net(x), y).backward()
        inner.step()
        time.sleep(4.0 if step == given.get("sleeps") else 0.05)
        met = outer.step()
        number = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
        print(json.dumps([met, number]), flush=True)
        if stop.exists():
            break
    outer.finish()
    print(json.dumps([p.flatten().tolist() for p in net.parameters()]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(json.loads(sys.argv[1]))
