"""Every model of tests/models as a recorded step, beside the same step as it is written.

    python benchmarks/recorded.py                        2 ranks, data, zero3 and tensor
    python benchmarks/recorded.py --models Llama ViT --plans zero3

A line: the largest difference of losses and gradients, over four steps with SGD, to the step as it
is written (each relative to its largest element); how many programs and messages; and the bytes
that rank 0 sends in a step, as written and as a program. A step that cannot be a program says why.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from tests.models.architectures import MODELS
from tests.models.programs import Compared, compared

PLANS = ("data", "zero3", "tensor")


def _worker(rank: int, world: int, file: str, models: list[str], plans: list[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in models:
        for plan in plans:
            found = compared(name, plan)
            if rank == 0:
                print(f"{name:20} {plan:7} {_line(found)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _line(found: Compared) -> str:
    if found.why:
        return f"as written: {found.why}"
    sent = f"{found.written:,} -> {found.recorded:,} bytes"
    return f"{found.error:.0e}, {found.messages} messages, {sent} {', '.join(found.saved)}".rstrip()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (args.ranks, f"{folder}/store", args.models, args.plans)
        context = get_context("spawn")
        ranks = [context.Process(target=_worker, args=(r, *given)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
