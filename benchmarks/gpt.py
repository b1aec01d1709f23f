"""A training step of a small GPT on the ranks of this machine: ours beside DistributedDataParallel,
FSDP2 and DTensor tensor parallel, in turn in one run, with peak memory.

    python benchmarks/gpt.py                2 ranks, gloo, one thread each
    python benchmarks/gpt.py --layers 3     5.1 M parameters instead of 10.0 M
    python benchmarks/gpt.py --hosts 2      ranks on two hosts: network namespaces, made by root
    python benchmarks/gpt.py --link 1Gbit,100us --ranks 4      2 x 2 ranks, and a slow link
    python benchmarks/gpt.py --link 100Mbit,100us --codecs     what is sent in fewer bytes

Each way runs in its own processes, so that its memory can be measured. All run at once and take one
step each, round after round, so that other load on the machine affects all equally. The ratios to
the lone rank count; it does a rank's part of the batch and sends nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hosts import add_option, bytes_between, described, enter, hosts
from benchmarks.progress import doing

VOCAB, DIM, HEADS, TOKENS, BATCH = 2048, 320, 8, 128, 8
Step = Callable[[], float]


class Block(nn.Module):
    """A pre-norm transformer block. If its weights are a part of the heads, it computes that
    part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(b, s, -1, DIM // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """tokens i64[b, s] -> logits f32[b, s, VOCAB]."""

    layers = 7  # in this process

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(torch.randn(TOKENS, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(self.layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def stepper(model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """A training step; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def part(rank: int) -> tuple[Tensor, Tensor]:
    """The rank's part of the batch."""
    tokens, targets = (x.chunk(dist.get_world_size())[rank] for x in batch())
    return tokens, targets


def lone(rank: int) -> Step:
    return stepper(GPT(), *part(rank))


def ddp(rank: int) -> Step:
    return stepper(nn.parallel.DistributedDataParallel(GPT()), *part(rank))


def ddp_with(hook: str) -> Callable[[int], Step]:
    """DDP with one of torch's hooks that send fewer bytes."""

    def make(rank: int) -> Step:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        # One bucket for the hook of PowerSGD: it waits for messages in callbacks, which take gloo's
        # two threads, and with two buckets both threads may wait for each other.
        one_bucket = 1000 if hook == "powersgd" else None
        model = nn.parallel.DistributedDataParallel(GPT(), bucket_cap_mb=one_bucket)
        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4)
            state.start_powerSGD_iter = 2  # the least that torch takes
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return stepper(model, *part(rank))

    return make


def fsdp(rank: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, *part(rank))


def dtensor(rank: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, mesh = GPT(), init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {"q": column, "k": column, "v": column, "up": column, "proj": row, "down": row},
        )
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return stepper(model, *batch())


COLUMNS_AND_ROWS = {
    **{f"blocks.*.{name}.*": 0 for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}.weight": 1 for name in ("proj", "down")},
    "head.weight": 0,
}


def ours(plan: dict[str, int] | str, split_batch: bool, **codecs: str) -> Callable[[int], Step]:
    def make(rank: int) -> Step:
        import consistent
        from consistent import B, S

        everywhere = consistent.placement.all("cpu")
        given = plan if isinstance(plan, str) else {k: S(d) for k, d in plan.items()}
        named = {"data": consistent.data_parallel, "zero3": consistent.zero3}
        given = named[str(plan)](**codecs) if codecs else given
        model = consistent.parallelize(GPT(), everywhere, given)
        lie = S(0) if split_batch else B
        return stepper(model, *(consistent.distribute(x, everywhere, lie) for x in batch()))

    return make


LONE = "lone rank, its part of the batch"
WAYS: dict[str, Callable[[int], Step]] = {
    LONE: lone,
    "batch split: ours": ours({}, True),
    "batch split: DDP": ddp,
    "batch and parameters split: ours": ours({"*": 0}, True),
    "batch and parameters split: zero3": ours("zero3", True),
    "batch and parameters split: FSDP2": fsdp,
    "columns and rows split: ours": ours(COLUMNS_AND_ROWS, False),
    "columns and rows split: DTensor": dtensor,
}

FEWER_BYTES: dict[str, Callable[[int], Step]] = {
    "zero3, bf16": ours("zero3", True, gather="bf16", reduce="bf16"),
    "zero3, fp8": ours("zero3", True, gather="fp8", reduce="fp8"),
    "zero3, int8": ours("zero3", True, gather="int8", reduce="int8"),
    "zero3, int8 and powersgd:4": ours("zero3", True, gather="int8", reduce="powersgd:4"),
    "zero3, int8, powersgd:16:int8": ours("zero3", True, gather="int8", reduce="powersgd:16:int8"),
    "data, int8": ours("data", True, reduce="int8"),
    "data, powersgd:4": ours("data", True, reduce="powersgd:4"),
    "data, powersgd:16:int8": ours("data", True, reduce="powersgd:16:int8"),
    "DDP, hook of fp16": ddp_with("fp16"),
    "DDP, hook of PowerSGD, rank 4": ddp_with("powersgd"),
}
MAKERS = WAYS | FEWER_BYTES


def resident() -> float:
    """The peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class World(NamedTuple):
    """The ranks of one way."""

    ranks: int
    port: int


class Answer(NamedTuple):
    """What a rank says of one step."""

    seconds: float
    cpu_s: float  # for which it had a processor: other work on the machine changes this less
    loss: float
    peak: float  # MiB


def serve(way: str, rank: int, world: World, layers: int, told: Connection) -> None:
    """A rank of one way: a step at each message, with an answer to each."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(world.port))
    enter(rank, world.ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    GPT.layers = layers
    dist.init_process_group("gloo", rank=rank, world_size=world.ranks)
    # All ways import the same libraries, so that these add the same memory to each.
    for library in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "consistent"):
        importlib.import_module(library)
    before = resident()
    step = MAKERS[way](rank)
    while told.recv():
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        loss = step()
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - used
        told.send(Answer(seconds, cpu_s, loss, resident() - before))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=GPT.layers)
    parser.add_argument("--ways", nargs="*", default=list(WAYS)[1:], choices=list(MAKERS)[1:])
    parser.add_argument("--codecs", action="store_true", help="zero3, data and DDP in fewer bytes")
    add_option(parser)
    options = parser.parse_args()
    GPT.layers = options.layers
    if options.codecs:
        zero3, ddp = "batch and parameters split: zero3", "batch split: DDP"
        options.ways = [zero3, ddp, *FEWER_BYTES]
    with hosts(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start all ways, let them step in turn, and print the table."""
    context, ways = get_context("spawn"), [LONE, *options.ways]
    started = {}
    for way in ways:
        world = World(options.ranks, free_port())
        pipes = [context.Pipe() for _ in range(options.ranks)]
        ranks = [
            context.Process(target=serve, args=(way, rank, world, options.layers, pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        started[way] = (ranks, [pipe[0] for pipe in pipes])

    def step(way: str) -> list[Answer]:
        _, ends = started[way]
        for end in ends:
            end.send(True)
        return [end.recv() for end in ends]

    try:
        first = {}
        for way in ways:
            doing(f"first step: {way}")
            first[way] = step(way)[0].loss
        times: dict[str, list[float]] = {way: [] for way in ways}
        cpu_times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.rounds):
            doing(f"round {turn + 1} of {options.rounds}")
            for way in ways:
                answers = step(way)
                times[way].append(max(answer.seconds for answer in answers))
                cpu_times[way].append(statistics.mean(answer.cpu_s for answer in answers))
        peaks, between = {}, {}
        for way in ways:
            before = bytes_between()
            peaks[way] = max(answer.peak for answer in step(way))
            between[way] = (bytes_between() - before) / 1e6
    finally:
        for ranks, ends in started.values():
            for end, process in zip(ends, ranks, strict=True):
                if process.is_alive():
                    end.send(False)
            for process in ranks:
                process.join(30)
                process.kill()
    count = sum(p.numel() for p in GPT().parameters()) / 1e6
    print(f"GPT of {count:.1f} M parameters, {BATCH} x {TOKENS} tokens, {options.ranks} ranks on "
          f"{described(options)}, torch {torch.__version__}, one thread each")  # fmt: skip
    print(f"{'':36}{'ms, median':>12}{'/ lone rank':>13}{'cpu ms':>8}{'/ lone rank':>13}"
          f"{'peak MiB':>10}{'first loss':>12}{'MB between hosts':>18}")  # fmt: skip
    base = times[LONE]
    for way, taken in times.items():
        ratio = statistics.median(t / b for t, b in zip(taken, base, strict=True))
        cpu_s = statistics.median(cpu_times[way])
        print(
            f"{way:36}{statistics.median(taken) * 1e3:12.0f}{ratio:13.2f}{cpu_s * 1e3:8.0f}"
            f"{cpu_s / statistics.median(cpu_times[LONE]):13.2f}{peaks[way]:10.0f}"
            f"{first[way]:12.4f}{between[way]:18.1f}"
        )


if __name__ == "__main__":
    main()
