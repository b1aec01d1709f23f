"""A training step whose sequence length varies: seconds until each new length runs at full speed.

    python benchmarks/sizes.py                       2 ranks, seven lengths
    python benchmarks/sizes.py --ranks 1 --lengths 64 48 40 56

One transformer block of benchmarks/gpt.py, AdamW, the batch split over ranks. Each way does three
steps of each length, and one is timed afterwards; nothing compiled is on disk before.

    plain, dynamic    torch.compile(dynamic=True) of model and loss, and of the optimizer's step, on
                      this rank's part of the batch; sends nothing
    by numbers        consistent.compile, with code for each length of its own
    compiled          consistent.compile as it is: code for the first length, and for all others
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor import compile_fx

import consistent
from benchmarks.gpt import DIM
from benchmarks.graph import OneBlock
from consistent import Placement, S
from consistent.compiled.backends import inductor

ROWS = 8
WAYS = ("plain, dynamic", "by numbers", "compiled")


def _plain() -> Any:
    model = OneBlock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y), dynamic=True)
    update = torch.compile(optimizer.step)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        update()
        return loss

    return step


def _ours() -> Any:
    model = consistent.parallelize(OneBlock(), Placement.all("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @consistent.compile(fullgraph=True)
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _given(way: str, length: int, rank: int, world: int) -> tuple[Any, Any]:
    x, y = torch.randn(ROWS, length, DIM), torch.randint(10, (ROWS,))
    if way.startswith("plain"):
        return x.chunk(world)[rank], y.chunk(world)[rank]
    p = Placement.all("cpu")
    return consistent.distribute(x, p, S(0)), consistent.distribute(y, p, S(0))


def _worker(rank: int, world: int, folder: str, way: str, lengths: list[int]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/code"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    compiler, compiled = compile_fx.compile_fx, []

    def counted(*given: Any, **how: Any) -> Any:
        compiled.append(None)
        return compiler(*given, **how)

    compile_fx.compile_fx = counted  # type: ignore[assignment]
    if way == "by numbers":
        inductor.MAX_CODES = 0
    step = _plain() if way.startswith("plain") else _ours()
    for length in lengths:
        given = _given(way, length, rank, world)
        times = []
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            step(*given)
            times.append(time.perf_counter() - begin)
        if rank == 0:
            count = "" if way.startswith("plain") else f"{len(compiled):10}"
            ready = f"{sum(times[:3]):10.2f}{1e3 * times[3]:12.1f}"
            print(f"{way:16}{length:8}{ready}{count}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 48, 40, 56, 32, 72, 24])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    args = parser.parse_args()
    print(f"torch {torch.__version__}, CPU, {args.ranks} rank(s), one thread each")
    print("way               length   ready, s   a step, ms  compiled")
    context = get_context("spawn")
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            given = (args.ranks, folder, way, args.lengths)
            ranks = [context.Process(target=_worker, args=(r, *given)) for r in range(args.ranks)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
