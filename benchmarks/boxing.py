"""What boxing costs between ranks of one machine: ours, torch.distributed with gloo (NCCL on CUDA),
DTensor, and a memcpy of the same bytes on every rank at once, measured in turn in one run.

    python benchmarks/boxing.py [--ranks 2 4] [--sizes 256 65536 67108864] [--rounds 7]
    python benchmarks/boxing.py --device cuda        one GPU for each rank, or ranks in turn

Sizes are bytes of the logical tensor, float32. Every way leaves its input unchanged and makes a new
tensor. The script prints how many microseconds a call takes on rank 0, the median over rounds, and
ratios of those medians. On a shared machine only the ratios count.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import mirrored
from benchmarks.device_time import Run, wait
from consistent import B, P, Placement, S
from consistent.movement.run import run as box
from consistent.spec import TensorSpec
from mirrored.transports.default import current

SIZES = [4**k for k in range(4, 13)] + [2**26]
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# From torch 2.13 on these have other names.
gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Pick = Callable[[list[float]], float]


def shape_of(nbytes: int) -> tuple[int, int]:
    """The shape of a matrix of so many bytes that 2 and 4 ranks can split along both dims."""
    rows = 2 ** (int(math.log2(nbytes // 4)) // 2)
    return rows, nbytes // 4 // rows


def moves(nbytes: int, rank: int, n: int, mesh: Any, device: str) -> dict[str, dict[str, Run]]:
    """Each move, done in each way."""
    shape, ranks = shape_of(nbytes), tuple(range(n))
    rows, columns = shape[0] // n, shape[1] // n
    placement = Placement(device, range(n))
    whole, rows_x = (torch.randn(*size, device=device) for size in (shape, (rows, shape[1])))

    def ours(src: Any, dst: Any) -> Run:
        specs = [TensorSpec.of(placement, (e,), shape, torch.float32) for e in (src, dst)]
        x = rows_x if src == S(0) else whole
        return lambda: box(x, *specs)

    def dtensor(src: Any, dst: Any) -> Run:
        local = rows_x if src == Shard(0) else whole
        x = DTensor.from_local(local, mesh, [src], run_check=False)
        return lambda: x.redistribute(mesh, [dst]).to_local()

    def reduce_by_torch() -> object:
        out = whole.clone()
        dist.all_reduce(out)
        return out

    def transpose_by_torch() -> object:
        sent = torch.cat([part.contiguous() for part in rows_x.split(columns, 1)])
        out = torch.empty(rows * n, columns, device=device)
        dist.all_to_all_single(out.view(-1), sent.view(-1))
        return out

    def broadcast_by_torch() -> object:
        out = whole.clone() if rank == 0 else torch.empty(shape, device=device)
        dist.broadcast(out, 0)
        return out

    def copy_of(x: torch.Tensor) -> Run:
        return lambda: x.clone()

    source = whole if rank == 0 else None
    return {
        "P -> B": {
            "ours": ours(P, B),
            "torch": reduce_by_torch,
            "DTensor": dtensor(Partial(), Replicate()),
            "memcpy": copy_of(whole),
        },
        "P -> S(0)": {
            "ours": ours(P, S(0)),
            "torch": lambda: scatter_sum(torch.empty_like(rows_x), whole),
            "DTensor": dtensor(Partial(), Shard(0)),
            "memcpy": copy_of(whole),
        },
        "S(0) -> B": {
            "ours": ours(S(0), B),
            "torch": lambda: gather_whole(torch.empty_like(whole), rows_x),
            "DTensor": dtensor(Shard(0), Replicate()),
            "memcpy": copy_of(whole),
        },
        "S(0) -> S(1)": {
            "ours": ours(S(0), S(1)),
            "torch": transpose_by_torch,
            "DTensor": dtensor(Shard(0), Shard(1)),
            "memcpy": copy_of(rows_x),
        },
        "broadcast": {
            "ours": lambda: mirrored.broadcast(source, shape, torch.float32, device, 0, ranks),
            "torch": broadcast_by_torch,
            "DTensor": lambda: distribute_tensor(whole, mesh, [Replicate()]).to_local(),
            "memcpy": copy_of(whole),
        },
    }


def measured(ways: dict[str, Run], args: argparse.Namespace) -> dict[str, float]:
    """Microseconds for a call of each way. Rank 0 decides how often all ranks call it."""
    everyone = tuple(range(dist.get_world_size()))
    clock = time.process_time if args.cpu else time.perf_counter
    pick: Pick = min if args.fastest else statistics.median
    counts = {}
    for name, way in ways.items():
        way()
        wait(args.device)
        start = time.perf_counter()
        way()
        wait(args.device)
        once = current().gather_objects(time.perf_counter() - start, everyone)[0]
        counts[name] = max(1, min(2000, int(args.seconds / once)))
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            dist.barrier()
            start = clock()
            for _ in range(counts[name]):
                way()
            wait(args.device)
            spent[name].append((clock() - start) / counts[name] * 1e6)
    return {name: pick(each) for name, each in spent.items()}


def measure(rank: int, n: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(BACKENDS[args.device], rank=rank, world_size=n)
    mesh = init_device_mesh(args.device, (n,))
    names = list(moves(SIZES[0], rank, n, mesh, args.device))
    theirs = "gloo" if args.device == "cpu" else "NCCL"
    for name in names:
        if rank == 0:
            print(f"\n{n} ranks, {name}")
            print(
                f"| bytes | ours | {theirs} | DTensor | memcpy | {theirs} / ours | ",
                "DTensor / ours | ",
                sep="",
                end="",
            )
            print("ours / memcpy |\n|" + " --- |" * 8)
        for nbytes in args.sizes:
            us = measured(moves(nbytes, rank, n, mesh, args.device)[name], args)
            if rank == 0:
                row = [f"{t:.1f}" for t in us.values()]
                row += [f"{us[way] / us['ours']:.1f}" for way in ("torch", "DTensor")]
                row += [f"{us['ours'] / us['memcpy']:.2f}"]
                print(f"| {nbytes} | " + " | ".join(row) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each way in each round")
    parser.add_argument("--fastest", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    for n in args.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(measure, (n, port, args), nprocs=n)


if __name__ == "__main__":
    main()
