"""Matrix products that overlap their boxing, beside the same in one piece. torchrun is not needed.

    python benchmarks/split_matmul.py [--ranks 2] [--rounds 9] [--chunks 1 2 4] [--gloo] [--wire 1]
    python benchmarks/split_matmul.py --device cuda [--ranks 2]    one GPU for each rank or all

Each figure is the time of product and boxing, one after the other (x @ w and to_global), divided by
that of ours in so many chunks, measured in turn in one run; above 1 ours is faster. --gloo switches
shared memory off. --wire adds to every call the time that its bytes take at so many GB/s. The
processor is idle in that time, as on a network that is slower than memory. "default" is ours with
the number of chunks that it chooses itself, which follows in brackets. On CUDA there are no chunks:
where ranks read each other's memory, ours is one fused op. Ranks that share a GPU take turns there.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import consistent
from benchmarks.device_time import Run, wait
from consistent import B, Placement, S
from consistent.overlap.chunked_matmul import chunk_count
from consistent.overlap.symmetric_matmul import fused_group_and_dim
from consistent.spec import P, TensorSpec
from mirrored.comm import Ranks, Transport
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.default import current, use

# (rows, summed, columns) of the logical product
SIZES = [(256, 512, 512), (1024, 2048, 512), (2048, 1024, 1024), (4096, 2048, 1024)]


class Wire(Wrapper):
    """A transport whose calls take longer, by the time that their bytes take at a given
    bandwidth."""

    def __init__(self, inner: Transport, gigabytes: float) -> None:
        super().__init__(inner)
        self.bandwidth = gigabytes * 1e9

    def _send(self, nbytes: float) -> None:
        time.sleep(nbytes / self.bandwidth)

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        self._send(2 * x.nbytes * (len(ranks) - 1) / len(ranks))
        return super().all_reduce(x, ranks, op)

    def all_gather_into_tensor(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks
    ) -> Tensor:
        self._send(x.nbytes * (len(ranks) - 1))
        return super().all_gather_into_tensor(x, dim, sizes, ranks)

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        self._send(x.nbytes * (len(ranks) - 1) / len(ranks))
        return super().reduce_scatter(x, dim, sizes, ranks, op)


def cases(size: tuple[int, int, int], placement: Placement, counts: list[int]) -> dict[str, dict]:
    """Name of the product -> {name of the way: its function}, for the plain sequence and ours."""
    rows, summed, columns = size
    x = consistent.randn(rows, summed, placement=placement, sbp=S(1))
    w = consistent.randn(summed, columns, placement=placement, sbp=S(0))
    x_rows = consistent.randn(rows, summed, placement=placement, sbp=S(0))
    w_columns = consistent.randn(summed, columns, placement=placement, sbp=S(1))
    plain = {
        "matmul_all_reduce": lambda: (x @ w).to_global(sbp=B),
        "matmul_reduce_scatter": lambda: (x @ w).to_global(sbp=S(0)),
        "all_gather_matmul": lambda: x_rows.to_global(sbp=B) @ w_columns,
    }

    def ours(name: str, chunks: int | None) -> Run:
        given = (x_rows, w_columns) if name.startswith("all") else (x, w)
        return lambda: getattr(consistent, name)(*given, chunks=chunks)

    found = {}
    for name, run in plain.items():
        ways = {str(n): ours(name, n) for n in counts}
        found[name] = {"plain": run, **ways, "default": ours(name, None)}
    return found


def default_way(name: str, size: tuple[int, int, int], placement: Placement) -> str:
    """The number of chunks that ours chooses, or that it is one op."""
    rows, summed, columns = size
    ends = (S(0), B) if name.startswith("all") else (P, B if name.endswith("reduce") else S(0))
    shape = (rows, summed) if name.startswith("all") else (rows, columns)
    specs = [TensorSpec.of(placement, (end,), shape, torch.float32) for end in ends]
    return "fused" if fused_group_and_dim(*specs) else str(chunk_count(*specs))


def medians(ways: dict[str, Run], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            wait(device)
            dist.barrier()
            start = time.perf_counter()
            run()
            wait(device)
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def start(given: argparse.Namespace, store: dist.Store, rank: int) -> None:
    if given.device == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=given.ranks)
        return
    torch.cuda.set_device(rank % torch.cuda.device_count())
    both = "cpu:gloo,cuda:nccl"
    dist.init_process_group(both, store=store, rank=rank, world_size=given.ranks)


def on_rank(rank: int, given: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    start(given, store, rank)
    placement = Placement(given.device, range(given.ranks))
    say = print if rank == 0 else lambda *args, **kwargs: None
    say("| rows x summed x columns |", *(f"{n} |" for n in given.chunks), "default |")
    say("| --- " * (len(given.chunks) + 2) + "|")
    slow = use(Wire(current(), given.wire)) if given.wire else nullcontext()
    with slow:
        for size in SIZES:
            for name, ways in cases(size, placement, given.chunks).items():
                times = medians(ways, given.rounds, given.device)
                ratios = [f"{times['plain'] / times[way]:.2f}" for way in list(ways)[1:]]
                ratios[-1] += f" ({default_way(name, size, placement)})"
                say(f"| {name} {' x '.join(map(str, size))} |", *(f"{r} |" for r in ratios))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--wire", type=float, default=0.0)
    given = parser.parse_args()
    given.chunks = [] if given.device == "cuda" else given.chunks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if given.gloo:
        os.environ["CONSISTENT_SHARED_MEMORY"] = "0"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(on_rank, (given, port), nprocs=given.ranks)


if __name__ == "__main__":
    main()
