"""Steps so small that what surrounds the arithmetic counts: each plan beside
DistributedDataParallel and FSDP2, times a lone rank's part of the batch.

    python benchmarks/small_steps.py                  2 ranks
    python benchmarks/small_steps.py --ranks 1        what a plan costs where there is one rank
    python benchmarks/small_steps.py --hosts 2        ranks on two hosts: network namespaces
    CONSISTENT_SHARED_MEMORY=0 python benchmarks/small_steps.py     ranks that send messages
    python benchmarks/small_steps.py --models cell --ways data zero3

One thread for each rank. Torch's ways run in processes that never load this library, ours in
others; all take their steps in turn, round after round, and only those of one way run at a time.
Medians of the rounds; the ratio is that of steps that were taken one after the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import free_port
from benchmarks.hosts import add_option, described, enter, hosts

Step = Callable[[], float]
LONE = "lone rank"


class Block(nn.Module):
    """A layer of 128 channels and 4 heads."""

    num_heads = 4  # by which ``tensor`` knows that attention can be split

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.q, self.k, self.v, self.proj = (nn.Linear(128, 128) for _ in range(4))
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, s, -1, 32).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two layers, 512 tokens."""

    batch = torch.randint(512, (8, 65), generator=torch.Generator().manual_seed(1))

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(128, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Cell(nn.Module):
    """A cell that is called at each of 20 steps."""

    batch = torch.randn(32, 20, 64, generator=torch.Generator().manual_seed(1))

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return self.head(state[0]).square().mean()


class MLP(nn.Module):
    """Three linear layers."""

    batch = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.down(F.relu(self.up(x))))).square().mean()


class Agent(nn.Module):
    """An actor and a critic, which an environment calls 16 times before they learn, as in PPO."""

    batch = torch.randn(16, 16, 8, generator=torch.Generator().manual_seed(1))

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)
            for last in (nn.Linear(64, 4), nn.Linear(64, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            values = torch.stack([self.critic(state) for state in x.unbind(1)], 1)
        chances = self.actor(x).log_softmax(-1)
        return (chances[..., 0] * values[..., 0]).mean() + (self.critic(x) - values).square().mean()


class Graph(nn.Module):
    """Two layers over a graph of 200 nodes, all of which every rank has whole."""

    whole = True
    batch = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)
        self.edges: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sparse.mm(self.edges, self.first(x)).relu()
        return torch.sparse.mm(self.edges, self.second(x)).square().mean()


def edges() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    places = torch.randint(200, (2, 1000), generator=generator)
    weights = torch.rand(1000, generator=generator)
    return torch.sparse_coo_tensor(places, weights, (200, 200), check_invariants=True).coalesce()


MODELS = {each.__name__.lower(): each for each in (Transformer, Cell, MLP, Agent, Graph)}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    if isinstance(model, Graph):
        model.edges = edges()
    return model


def part(name: str, rank: int) -> Tensor:
    model = MODELS[name]
    if hasattr(model, "whole"):
        return model.batch
    return model.batch.chunk(dist.get_world_size())[rank].clone()


def stepper(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def lone(name: str, rank: int) -> Step:
    return stepper(made(name), part(name, rank))


def ddp(name: str, rank: int) -> Step:
    return stepper(nn.parallel.DistributedDataParallel(made(name)), part(name, rank))


def fsdp(name: str, rank: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = made(name), init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        for each in child if isinstance(child, nn.ModuleList | nn.Sequential) else [child]:
            if any(True for _ in each.parameters()):
                fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, part(name, rank))


def ours(plan: str) -> Callable[[str, int], Step]:
    def make(name: str, rank: int) -> Step:
        import consistent
        from consistent import B, S

        everywhere = consistent.placement.all("cpu")
        model, whole = made(name), plan == "tensor" or hasattr(MODELS[name], "whole")
        if isinstance(model, Graph):
            model.edges = consistent.distribute(model.edges, everywhere, B)
        consistent.parallelize(model, everywhere, plan)
        batch = MODELS[name].batch
        return stepper(model, consistent.distribute(batch, everywhere, B if whole else S(0)))

    return make


TORCHS: dict[str, Callable[[str, int], Step]] = {LONE: lone, "DDP": ddp, "FSDP2": fsdp}
OURS = {name: ours(name) for name in ("data", "zero1", "zero2", "zero3", "tensor")}
WAYS = {**TORCHS, **OURS}


def serve(rank: int, ranks: int, port: int, asked: list[tuple[str, str]], told: Connection) -> None:
    """A rank of torch's ways, or of ours: takes steps of one way at each message, and answers with
    seconds for each and the last loss."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    enter(rank, ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    steps = {(model, way): WAYS[way](model, rank) for model, way in asked}
    while (request := told.recv()) is not None:
        *key, count = request
        step = steps[tuple(key)]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            loss = step()
        told.send(((time.perf_counter() - start) / count, loss))
    dist.destroy_process_group()


class World:
    """The ranks of some ways."""

    def __init__(self, ranks: int, models: list[str], ways: list[str]) -> None:
        context, port = get_context("spawn"), free_port()
        pipes = [context.Pipe() for _ in range(ranks)]
        asked = [(model, way) for model in models for way in ways]
        self.ends = [pipe[0] for pipe in pipes]
        self.ranks = [
            context.Process(target=serve, args=(r, ranks, port, asked, pipe[1]), daemon=True)
            for r, pipe in enumerate(pipes)
        ]
        for process in self.ranks:
            process.start()

    def steps(self, model: str, way: str, count: int) -> tuple[float, float]:
        """Seconds of one of ``count`` steps, and the loss of the first rank."""
        for end in self.ends:
            end.send((model, way, count))
        answers = [end.recv() for end in self.ends]
        return max(seconds for seconds, _ in answers), answers[0][1]

    def end(self) -> None:
        for end, process in zip(self.ends, self.ranks, strict=True):
            if process.is_alive():
                end.send(None)
        for process in self.ranks:
            process.join(20)
            process.kill()


def measured(
    worlds: dict[str, World], model: str, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Way -> seconds of a step, in each round."""
    counts = {}
    for way, world in worlds.items():
        world.steps(model, way, 5)
        counts[way] = max(2, int(seconds / world.steps(model, way, 3)[0]))
    taken: dict[str, list[float]] = {way: [] for way in worlds}
    for _ in range(rounds):
        for way, world in worlds.items():
            taken[way].append(world.steps(model, way, counts[way])[0])
    return taken


def show(model: str, taken: dict[str, list[float]]) -> None:
    base = taken[LONE]
    print(f"\n{model:20}{'ms, median':>12}{'/ lone rank':>13}{'quarters':>16}", flush=True)
    for way, found in taken.items():
        ratios = [t / b for t, b in zip(found, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{way:20}{statistics.median(found) * 1e3:12.2f}{statistics.median(ratios):13.2f}"
            f"{f'{low:.2f} .. {high:.2f}':>16}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.06, help="of a way in a round")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS)[1:], choices=list(WAYS)[1:])
    add_option(parser)
    options = parser.parse_args()
    with hosts(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start all ways, let them step in turn, and print a table for each model."""
    ways = [LONE, *options.ways]
    sides = [[w for w in ways if w in TORCHS], [w for w in ways if w in OURS]]
    made = [(World(options.ranks, options.models, side), side) for side in sides if side]
    worlds = {way: world for world, side in made for way in side}
    try:
        print(
            f"{options.ranks} ranks on {described(options)}, torch {torch.__version__}, "
            "one thread each"
        )
        for model in options.models:
            show(model, measured(dict(sorted(worlds.items(), key=lambda x: ways.index(x[0]))),
                                 model, options.rounds, options.seconds))  # fmt: skip
    finally:
        for world, _ in made:
            world.end()


if __name__ == "__main__":
    main()
