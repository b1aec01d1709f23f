"""Training steps as compiled programs: plain torch, DistributedDataParallel, ours and DTensor, each
eager and compiled, in turn in one run.

    python benchmarks/graph.py                         1 rank and 2 ranks, all models
    python benchmarks/graph.py --ranks 2 --models mlp gpt --rounds 30
    python benchmarks/graph.py --ranks 2 --hosts 2     ranks on two hosts: network namespaces

The batch is split over ranks, parameters are whole on each; the optimizer is AdamW. "plain" does
this rank's part of the batch and sends nothing. "plain, compiled" is torch.compile of model and
loss, and of the optimizer's step; "DDP, compiled" is that of a DistributedDataParallel. Ratios are
medians of the times of one round each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from benchmarks.gpt import GPT, VOCAB, Block
from benchmarks.hosts import add_option, described, enter, hosts
from benchmarks.progress import doing
from consistent import Placement, S

ROWS, TOKENS, DIM = 8, 64, 320
Step = Callable[[], Any]


class Mlp(nn.Module):
    """Three small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class LeNet(nn.Module):
    """Two convolutions and three layers, as of LeCun et al. (1998)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.layers = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        return self.layers(F.max_pool2d(F.relu(self.second(x)), 2).flatten(1))


class OneBlock(nn.Module):
    """A transformer block, with a sum at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(DIM, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.block(x).mean(1))


class SmallGpt(GPT):
    """GPT of two blocks, on 64 tokens."""

    layers = 2

    def forward(self, tokens: Any) -> Any:
        x = self.token(tokens) + self.position[:TOKENS]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def _batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    match name:
        case "mlp":
            x, y = torch.randn(32, 64, generator=rng), torch.randint(10, (32,), generator=rng)
        case "lenet":
            x, y = (
                torch.randn(32, 1, 28, 28, generator=rng),
                torch.randint(10, (32,), generator=rng),
            )
        case "block":
            x, y = torch.randn(ROWS, TOKENS, DIM, generator=rng), torch.randint(10, (ROWS,))
        case _:
            x, y = (torch.randint(VOCAB, (ROWS, TOKENS), generator=rng) for _ in range(2))
            return x, y
    return x, y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "block": OneBlock,
    "lenet": LeNet,
    "gpt": SmallGpt,
}


def _loss(model: nn.Module, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y.flatten())


def _plain(name: str, rank: int, world: int, compiled: bool) -> Step:
    return _torchs(MODELS[name](), name, rank, world, compiled)


def _ddp(name: str, rank: int, world: int, compiled: bool) -> Step:
    model = nn.parallel.DistributedDataParallel(MODELS[name]())
    return _torchs(model, name, rank, world, compiled)


def _torchs(model: nn.Module, name: str, rank: int, world: int, compiled: bool) -> Step:
    """A step of torch's own on this rank's part of the batch."""
    x, y = _batch(name)
    x, y = (t.chunk(world)[rank] for t in (x, y))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(lambda x, y: _loss(model, x, y)) if compiled else None
    update = torch.compile(optimizer.step) if compiled else optimizer.step

    def step() -> Any:
        optimizer.zero_grad()
        loss = _loss(model, x, y) if loss_of is None else loss_of(x, y)
        loss.backward()
        update()
        return loss

    return step


def _ours(name: str, rank: int, world: int, compiled: bool) -> Step:
    p = Placement.all("cpu")
    model = consistent.parallelize(MODELS[name](), p)
    x, y = (consistent.distribute(t, p, S(0)) for t in _batch(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = _loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    run = consistent.compile(step, fullgraph=True) if compiled else step
    return lambda: run(x, y)


def _dtensor(name: str, rank: int, world: int, compiled: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    model = distribute_module(MODELS[name](), mesh)
    x, y = (distribute_tensor(t, mesh, [Shard(0)]) for t in _batch(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(lambda x, y: _loss(model, x, y)) if compiled else None

    def step() -> Any:
        optimizer.zero_grad()
        loss = _loss(model, x, y) if loss_of is None else loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


WAYS: dict[str, tuple[Callable[..., Step], bool]] = {
    "plain": (_plain, False),
    "plain, compiled": (_plain, True),
    "DDP": (_ddp, False),
    "DDP, compiled": (_ddp, True),
    "ours": (_ours, False),
    "ours, compiled": (_ours, True),
    "DTensor": (_dtensor, False),
    "DTensor, compiled": (_dtensor, True),
}


def _worker(
    rank: int, world: int, file: str, models: list[str], ways: list[str], rounds: int
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    enter(rank, world)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in models:
        steps: dict[str, Step] = {}
        made: dict[str, float] = {}
        for way, (make, compiled) in ((way, WAYS[way]) for way in ways):
            torch.manual_seed(0)
            dist.barrier()
            doing(f"{name}, first steps: {way}") if rank == 0 else None
            begin = time.perf_counter()
            error = ""
            try:
                steps[way] = make(name, rank, world, compiled)
                for _ in range(3):
                    steps[way]()
            except Exception as raised:  # noqa: BLE001 - the rival's failures are a result
                error = f"{type(raised).__name__}: {raised}".splitlines()[0][:100]
            failed: list[Any] = [None] * world
            dist.all_gather_object(failed, error)
            if any(failed):
                steps.pop(way, None)
                if rank == 0:
                    print(f"  {name:6} {way}: {failed[0] or failed[-1]}")
            made[way] = time.perf_counter() - begin
        times: dict[str, list[float]] = {way: [] for way in steps}
        doing(f"{name}, {rounds} rounds") if rank == 0 else None
        for _ in range(rounds):
            for way, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(3):
                    step()
                times[way].append((time.perf_counter() - begin) / 3)
        if rank == 0:
            _show(name, world, times, made)
    dist.barrier()
    dist.destroy_process_group()


def _show(name: str, world: int, times: dict[str, list[float]], made: dict[str, float]) -> None:
    print(
        f"\n{name}, {world} rank(s)        ms a step   / plain   / plain, compiled   ready after s"
    )
    for way, own in times.items():
        ratios = [
            statistics.median(a / b for a, b in zip(own, times[base], strict=True))
            for base in ("plain", "plain, compiled")
            if base in times
        ]
        shown = "".join(f"{ratio:12.2f}" for ratio in ratios)
        print(f"  {way:20}{1e3 * statistics.median(own):12.3f}{shown}{made[way]:16.1f}", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=20)
    add_option(parser)
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, CPU, one thread a rank, AdamW, median of {args.rounds}, "
        f"{described(args)}"
    )
    with hosts(args):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            given = (world, f"{folder}/store", args.models, args.ways, args.rounds)
            context = get_context("spawn")
            ranks = [context.Process(target=_worker, args=(r, *given)) for r in range(world)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
