"""How long training stands still for a save: ours beside torch.distributed.checkpoint's, in turn.

    python benchmarks/checkpoint.py                    2 ranks, gloo, 400 MB, 5 rounds
    python benchmarks/checkpoint.py --mb 100 --ranks 4 --folder /mnt/disk
    python benchmarks/checkpoint.py --hosts 2          ranks on two hosts: network namespaces

Three states of the same size are saved: one of global tensors split over the ranks by
``consistent.checkpoint``, one of DTensors split alike, and one of plain tensors that every rank has
whole, both by ``torch.distributed.checkpoint``. "stall" is the time after which an asynchronous
save returns, "sync" that of a synchronous one, which waits for the disk; the ratio counts. A round
does all of them one after the other, so that other load affects all equally.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
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

from benchmarks.hosts import add_option, described, enter, hosts

SIDE = 1024  # of each weight: 4 MB
WAYS = ("consistent", "DTensor", "plain")

Save = Callable[[str], Callable[[], object] | None]  # what waits for an asynchronous one


def weights(mb: int) -> dict[str, torch.Tensor]:
    """Weights of that many megabytes together."""
    count = max(1, mb * 1_000_000 // (4 * SIDE * SIDE))
    return {f"layers.{k}.weight": torch.full((SIDE, SIDE), float(k)) for k in range(count)}


def ways(mb: int, ranks: int) -> dict[tuple[str, str], Save]:
    """(way, "sync" or "stall") -> a function that saves to a path."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import consistent

    placement = consistent.Placement("cpu", range(ranks))
    mesh = init_device_mesh("cpu", (ranks,))
    own: Any = dist.new_group(backend="gloo")
    plain = weights(mb)
    ours = {
        k: consistent.distribute(x, placement, consistent.S(0)).clone() for k, x in plain.items()
    }
    theirs = {k: distribute_tensor(x, mesh, [Shard(0)]) for k, x in plain.items()}

    def save_ours(path: str, wait: bool) -> Any:
        consistent.checkpoint.save(path, weights=ours, keep=1, wait=wait)
        return consistent.checkpoint.wait

    def later(state: dict[str, Any]) -> Save:
        return lambda path: dcp.async_save(state, checkpoint_id=path, process_group=own).result

    def now(state: dict[str, Any]) -> Save:
        return lambda path: dcp.save(state, checkpoint_id=path) and None

    return {
        ("consistent", "sync"): lambda path: save_ours(path, True),
        ("consistent", "stall"): lambda path: save_ours(path, False),
        ("DTensor", "sync"): now(theirs),
        ("DTensor", "stall"): later(theirs),
        ("plain", "sync"): now(plain),
        ("plain", "stall"): later(plain),
    }


def measure(rank: int, args: argparse.Namespace, port: int, folder: str, pipe: Any) -> None:
    """One rank: sends the seconds of each way and round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    enter(rank, args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    found: dict[tuple[str, str], list[float]] = {}
    saves = ways(args.mb, args.ranks)
    for each in range(args.rounds + 1):
        for key, save in saves.items():
            path = os.path.join(folder, "-".join(key))
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()  # what others have written does not count
            dist.barrier()
            start = time.perf_counter()
            finish = save(path)
            took = time.perf_counter() - start
            if finish is not None:
                finish()
            if each:  # the first round makes plans and finds connections
                found.setdefault(key, []).append(took)
    pipe.send(found)
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> list[dict[tuple[str, str], list[float]]]:
    """The seconds on each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        pipes, processes = [], []
        for rank in range(args.ranks):
            here, there = context.Pipe()
            process = context.Process(target=measure, args=(rank, args, port, folder, there))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; else the temporary folder")
    add_option(parser)
    args = parser.parse_args()
    with hosts(args):
        found = run(args)
    print(
        f"{args.mb} MB on {args.ranks} ranks, {described(args)}, "
        f"median of {args.rounds} rounds, the slowest rank\n"
    )
    print(f"{'':12}{'sync':>10}{'stall':>10}{'ratio':>9}")
    for way in WAYS:
        rounds = {
            kind: [max(seconds) for seconds in zip(*(f[way, kind] for f in found), strict=True)]
            for kind in ("sync", "stall")
        }
        sync, stall = (statistics.median(rounds[kind]) for kind in ("sync", "stall"))
        ratio = statistics.median(
            a / b for a, b in zip(rounds["stall"], rounds["sync"], strict=True)
        )
        print(f"{way:12}{sync * 1e3:7.0f} ms{stall * 1e3:7.0f} ms{ratio:8.1%}")


if __name__ == "__main__":
    main()
