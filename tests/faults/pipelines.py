"""A pipeline on 4 ranks in which something goes wrong: `launch("tests/faults/pipelines.py", name)`.

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

import consistent
from consistent import Placement
from tests.consistent.pipeline.gpt import GPT, batch, loss_of
from tests.faults.setting import ASTRAY, T


class Fault:
    """What a block does in its second step: on the ranks of its stage alone."""

    def __init__(self, name: str) -> None:
        self.name, self.calls, self.armed = name, 0, False

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        if not self.armed or not torch.distributed.get_rank() == 2:
            return output
        self.calls += 1
        if self.calls < 3:
            return output
        if self.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "raises":
            raise KeyError("this block is tired")
        if self.name == "late":
            time.sleep(ASTRAY)
        return output[..., :-1] if self.name == "other shape" else output


def run(name: str) -> None:
    rank, world = dist.get_rank(), [Placement("cpu", [r]) for r in range(4)]
    torch.set_num_threads(1)
    if name == "left out":
        consistent.nn.pipeline(GPT(4), world[:3], loss=loss_of)
    net, fault = GPT(4), Fault(name)
    net.blocks[2].register_forward_hook(fault)
    names = ["blocks.1", "blocks.2", "blocks.3"]
    pipe = consistent.nn.pipeline(net, world, names, loss=loss_of, micro_batches=4)
    ids, target = batch(0)
    pipe.step(ids, target)
    fault.armed = True
    time.sleep(0.3)
    if name == "micro-batches" and rank == 3:
        pipe.micro_batches = 8
    if name == "batch" and rank == 1:
        ids, target = ids[:6], target[:6]
    pipe.step(ids, target)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=T))
    start = time.monotonic()
    try:
        run(sys.argv[1])
    except Exception as error:  # noqa: BLE001 - it is what the test reads
        words = "\n".join([str(error), *getattr(error, "__notes__", [])])
        text = {"raised": type(error).__name__, "words": words, "seconds": time.monotonic() - start}
        print(json.dumps(text), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
