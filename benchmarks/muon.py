"""A step of `torch.optim.Muon` on the ranks of this machine: whole matrices on their owners, beside
the plan's own way, in which each matrix stays split, and beside one rank alone.

    torchrun --nproc_per_node 2 benchmarks/muon.py
    torchrun --nproc_per_node 2 benchmarks/muon.py --plan zero2 --blocks 4

Each rank has one thread. The ways take turns, round after round. While one rank is alone the others
sleep; where each rank steps all matrices, cores are as busy as they are when ranks share the work,
which on many machines makes each slower. Times are medians of the slowest rank's; bytes are those
of the busiest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import consistent
from mirrored.transports.counting import counting

ALONE = "one rank alone"
Way = tuple[list[Any], torch.optim.Optimizer]


def shapes_of(blocks: int, dim: int) -> list[tuple[int, int]]:
    return [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)] * blocks


def weights(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


class Matrices(torch.nn.Module):
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(weights(shapes))


def split_way(shapes: list[tuple[int, int]], plan: str, owned: bool) -> Way:
    """Muon under a plan, and whether owners step whole matrices."""
    placement = consistent.Placement.all("cpu")
    model = consistent.parallelize(Matrices(shapes), placement, plan)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    if not owned:
        consistent.matrix_step(optimizer, groups=lambda group: False)
    return list(model.parameters()), optimizer


def lone_way(shapes: list[tuple[int, int]]) -> Way:
    params = [torch.nn.Parameter(x) for x in weights(shapes)]
    return params, torch.optim.Muon(params, lr=0.01)


def give_gradients(params: list[Any]) -> None:
    for i, p in enumerate(params):
        torch.manual_seed(i)
        grad = torch.randn(p.shape)
        if isinstance(p, consistent.GlobalTensor):
            grad = consistent.distribute(grad, p.placement, p.sbp)
        p.grad = grad


def seconds(step: Callable[[], Any], alone: bool) -> float:
    """Of the slowest rank; where one is alone, the others wait for it asleep."""
    dist.barrier()
    start = time.perf_counter()
    if not alone or dist.get_rank() == 0:
        step()
    took = torch.tensor(time.perf_counter() - start)
    if alone:
        took *= dist.get_rank() == 0
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="zero3")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = shapes_of(options.blocks, options.dim)
    ways = {
        ALONE: lone_way(shapes),
        "each rank all matrices": lone_way(shapes),
        f"{options.plan}, split matrices": split_way(shapes, options.plan, False),
        f"{options.plan}, whole ones on owners": split_way(shapes, options.plan, True),
    }
    sent, took = {}, {name: [] for name in ways}
    for params, _ in ways.values():
        give_gradients(params)
    for k in range(options.rounds + 1):
        for name, (_, optimizer) in ways.items():
            with counting() as log:
                spent = seconds(optimizer.step, name == ALONE)
            sent[name] = log.bytes
            if k:  # the first one makes the state
                took[name].append(spent)
    busiest = {name: torch.tensor(each) for name, each in sent.items()}
    for each in busiest.values():
        dist.all_reduce(each, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        report(options, shapes, {n: statistics.median(x) for n, x in took.items()}, busiest)
    dist.destroy_process_group()


def report(options: Any, shapes: list, took: dict[str, float], sent: dict[str, Any]) -> None:
    count = sum(m * n for m, n in shapes)
    print(f"{len(shapes)} matrices, {count * 4 / 1e6:.1f} MB, {dist.get_world_size()} ranks")
    lone = took[ALONE]
    for name, spent in took.items():
        print(f"{name:34} {spent * 1e3:9.1f} ms  {spent / lone:5.2f}  {int(sent[name]):12,} bytes")


if __name__ == "__main__":
    main()
