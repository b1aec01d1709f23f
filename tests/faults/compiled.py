"""A compiled step on 4 ranks in which something goes wrong: `launch("tests/faults/compiled.py",
name)`.

Each rank prints what it raised, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import consistent
from consistent import B, Placement, S
from tests.faults.setting import ASTRAY, T


class Sgd(torch.optim.SGD):
    """A step that runs as it is written, in which rank 2 does something else when it is armed."""

    armed = ""

    def step(self, closure: Any = None) -> Any:
        if self.armed and dist.get_rank() == 2:
            if self.armed == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.armed == "raises":
                raise KeyError("this optimizer is tired")
            if self.armed == "late":
                time.sleep(ASTRAY)
        return super().step(closure)


def run(name: str) -> None:
    torch.set_num_threads(1)
    p = Placement.all("cpu")
    torch.manual_seed(0)
    model = consistent.parallelize(nn.Linear(4, 4), p)
    optimizer = Sgd(model.parameters(), lr=0.1)

    @consistent.compile(backend="ops", fullgraph=True)
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return model(x).sum(0).to_global(sbp=B)

    x = consistent.distribute(torch.ones(8, 4), p, S(0))
    for _ in range(3):
        step(x)
    assert len(step.programs) == 1
    time.sleep(0.3)
    if name == "one step less" and dist.get_rank() == 2:
        time.sleep(ASTRAY)
        return
    Sgd.armed = name
    step(x)
    step(x)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=T))
    try:
        run(sys.argv[1])
    except Exception as error:  # noqa: BLE001 - it is what the test reads
        words = "\n".join([str(error), *getattr(error, "__notes__", [])])
        print(json.dumps({"raised": type(error).__name__, "words": words}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
