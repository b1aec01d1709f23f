"""Peak memory, bytes and time of a step of a large GPT: `zero3` beside FSDP2, on the ranks of this
machine.

    python benchmarks/zero.py                 2 ranks, 400 MB of parameters
    python benchmarks/zero.py --ranks 4
    python benchmarks/zero.py --hosts 2       ranks on two hosts: network namespaces, made by root

Each way runs in its own processes, one way after the other in turn, round after round. SGD, so that
memory is that of parameters and gradients. Peaks are those of one step: of the process, and of its
tensors alone; `before` are the tensors that there are when it begins, `built` is the process's peak
when the model was made. A gather and a reduce-scatter count as (k-1)/k of the tensor. It takes two
to three minutes, and prints what it does.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpt
from benchmarks.hosts import add_option, described, enter, hosts
from benchmarks.progress import doing

MIB = 1 << 20
Sent = Callable[[], int]


def shape_model(layers: int, dim: int, vocabulary: int, batch: int) -> None:
    gpt.DIM, gpt.HEADS, gpt.VOCAB, gpt.BATCH = dim, dim // 64, vocabulary, batch
    gpt.GPT.layers = layers


def stepper(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> gpt.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def lone(rank: int) -> tuple[gpt.Step, Sent]:
    tokens, targets = (x.chunk(dist.get_world_size())[rank] for x in gpt.batch())
    step = stepper(gpt.GPT(), tokens, targets)
    return step, lambda: int(step() * 0)


def ours(rank: int, on_meta: bool = False) -> tuple[gpt.Step, Sent]:
    import consistent
    from consistent import S
    from mirrored.transports import default
    from mirrored.transports.counting import Counting

    everywhere = consistent.placement.all("cpu")
    with torch.device("meta" if on_meta else "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # positions have no initialiser of their own
        model = consistent.parallelize(gpt.GPT(), everywhere, "zero3")
    torch.nn.init.normal_(model.position, std=0.02) if on_meta else None
    step = stepper(model, *(consistent.distribute(x, everywhere, S(0)) for x in gpt.batch()))

    def sent() -> int:
        with default.replace_current(Counting(default.current())) as counted:
            step()
        return counted.bytes

    return step, sent


def deferred(rank: int) -> tuple[gpt.Step, Sent]:
    return ours(rank, on_meta=True)


def fsdp(rank: int) -> tuple[gpt.Step, Sent]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    model, mesh = gpt.GPT(), init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens, targets = (x.chunk(ranks)[rank] for x in gpt.batch())
    step = stepper(model, tokens, targets)

    def sent() -> int:
        total = 0
        kept = dist.all_gather_single, dist.reduce_scatter_single

        def counted(function: Callable, whole: Callable[[tuple, dict], torch.Tensor]) -> Callable:
            def call(*args: Any, **named: Any) -> Any:
                nonlocal total
                total += whole(args, named).nbytes * (ranks - 1) // ranks
                return function(*args, **named)

            return call

        dist.all_gather_single = counted(kept[0], lambda args, named: args[0])
        dist.reduce_scatter_single = counted(kept[1], lambda args, named: named["input"])
        try:
            step()
        finally:
            dist.all_gather_single, dist.reduce_scatter_single = kept
        return total

    return step, sent


WAYS: dict[str, Callable[[int], tuple[gpt.Step, Sent]]] = {
    "lone rank, its part of the batch": lone,
    "zero3: ours": ours,
    "zero3: ours, built on meta": deferred,
    "zero3: FSDP2": fsdp,
}


def tracked(sent: Sent) -> tuple[float, int]:
    """The most memory in MiB that tensors have during a step beyond what they have before it, and
    the bytes that it sends."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        nbytes = sent()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / MIB, nbytes


def held() -> float:
    """MiB of all tensors that Python can see."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and type(each).__name__ != "DTensor":
            with torch._C.DisableTorchFunctionSubclass():
                if each.layout is torch.strided and not each.is_meta:
                    storage = each.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return sum(found.values()) / MIB


def resident() -> float:
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def serve(way: str, rank: int, ranks: int, port: int, sizes: tuple, told: Connection) -> None:
    """A rank of one way. Answers "step" with (seconds, loss), "memory" with MiB and bytes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    enter(rank, ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape_model(*sizes)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for library in ("torch.distributed.fsdp", "consistent"):  # the same memory in all ways
        importlib.import_module(library)
    before = resident()
    step, sent = WAYS[way](rank)
    built = resident() - before
    while (asked := told.recv()) != "end":
        dist.barrier()
        start = time.perf_counter()
        if asked == "step":
            loss = step()
            told.send((time.perf_counter() - start, loss))
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what construction has left
            forget_peak()
            step()
            peak = resident() - before
            shard = held()
            most, nbytes = tracked(sent)
            told.send((peak, shard + most, shard, nbytes, built))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    add_option(parser)
    options = parser.parse_args()
    with hosts(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start all ways, let them step in turn, and print the table."""
    sizes = options.layers, options.dim, options.vocabulary, options.batch
    shape_model(*sizes)
    context, running = get_context("spawn"), {}
    for way in options.ways:
        port, pipes = gpt.free_port(), [context.Pipe() for _ in range(options.ranks)]
        ranks = [
            context.Process(target=serve, args=(way, r, options.ranks, port, sizes, pipe[1]))
            for r, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        running[way] = (ranks, [pipe[0] for pipe in pipes])

    def ask(way: str, what: str) -> list[tuple]:
        _, ends = running[way]
        for end in ends:
            end.send(what)
        return [end.recv() for end in ends]

    try:
        losses = {}
        for way in options.ways:
            doing(f"first step: {way}")
            losses[way] = ask(way, "step")[0][1]
        times: dict[str, list[float]] = {way: [] for way in options.ways}
        for turn in range(options.rounds):
            doing(f"round {turn + 1} of {options.rounds}")
            for way in options.ways:
                times[way].append(max(seconds for seconds, _ in ask(way, "step")))
        memory = {}
        for way in options.ways:
            doing(f"memory: {way}")
            columns = zip(*ask(way, "memory"), strict=True)
            memory[way] = [max(column) for column in columns]
    finally:
        for ranks, ends in running.values():
            for end, process in zip(ends, ranks, strict=True):
                if process.is_alive():
                    end.send("end")
            for process in ranks:
                process.join(30)
                process.kill()
    with torch.device("meta"):
        model = gpt.GPT()
    nbytes = sum(p.nbytes for p in model.parameters()) / MIB
    layer = sum(p.nbytes for p in model.blocks[0].parameters()) / MIB
    print(
        f"GPT of {nbytes:.0f} MiB, a layer {layer:.0f} MiB, {options.batch} x {gpt.TOKENS} tokens, "
        f"{options.ranks} ranks on {described(options)}, torch {torch.__version__}, "
        "one thread each"
    )
    print(
        f"{'':34}{'ms, median':>11}{'/ lone':>8}{'peak MiB: resident':>20}{'tensors':>9}"
        f"{'before':>8}{'built':>8}{'MiB sent':>10}{'first loss':>12}"
    )
    base = times[options.ways[0]]
    for way, taken in times.items():
        ratio = statistics.median(t / b for t, b in zip(taken, base, strict=True))
        peak, tensors, shard, sent, built = memory[way]
        print(
            f"{way:34}{statistics.median(taken) * 1e3:11.0f}{ratio:8.2f}{peak:20.0f}{tensors:9.0f}"
            f"{shard:8.0f}{built:8.0f}{sent / MIB:10.1f}{losses[way]:12.4f}"
        )


if __name__ == "__main__":
    main()
