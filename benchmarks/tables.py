"""A recommender like DLRM (Naumov et al. 2019) with a table of 10 million rows, trained on the
ranks of this machine, beside the same training in one process.

    torchrun --nproc_per_node 2 benchmarks/tables.py
    torchrun --nproc_per_node 2 benchmarks/tables.py --rows 1000000 --batch 8192

Dense features go through an MLP, and bags of indices through `embedding_bag` of one table, which
has the rows of all categories one after the other; products of all pairs of vectors go through a
second MLP to a click. Rows and batch are split over the ranks. The table has sparse gradients and
is stepped by Adagrad, the MLPs by SGD. Every rank has one thread. Then the first rank trains a
plain copy on whole batches, while the others wait, and losses are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S
from mirrored.transports.counting import counting

DENSE = 13


class Recommender(nn.Module):
    """Clicks of (dense features [batch, 13], indices [batch, categories, bag])."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.categories, dim = options.categories, options.dim
        self.table = nn.EmbeddingBag(options.rows, dim, mode="sum", sparse=True)
        with torch.no_grad():
            self.table.weight.mul_(dim**-0.5)
        pairs = (self.categories + 1) * self.categories // 2
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = self.table(indices.flatten(0, 1)).unflatten(0, (-1, self.categories))
        every = torch.cat([x[:, None], found], 1)
        products = every @ every.transpose(1, 2)
        first, second = torch.tril_indices(self.categories + 1, self.categories + 1, -1)
        return self.top(torch.cat([x, products[:, first, second]], 1)).squeeze(1)


def batches(options: argparse.Namespace) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Some rows are looked up far more often than others, as in logs of clicks."""
    generator = torch.Generator().manual_seed(1)
    size, of_each = options.batch, options.rows // options.categories
    made = []
    for _ in range(options.steps):
        dense = torch.randn(size, DENSE, generator=generator)
        at = torch.rand(size, options.categories, options.bag, generator=generator).pow(4) * of_each
        indices = at.long() + torch.arange(options.categories)[:, None] * of_each
        clicks = (dense.sum(1) + (indices.sum((1, 2)) % 7 - 3) > 0).float()
        made.append((dense, indices, clicks))
    return made


@dataclass
class Run:
    """Losses, seconds and bytes of each step; those of the optimizers are told apart."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)


def train(model: nn.Module, every: list[Any]) -> Run:
    run = Run()
    table = [p for name, p in model.named_parameters() if name.startswith("table")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("table")]
    steps = [torch.optim.Adagrad(table, lr=0.05), torch.optim.SGD(rest, lr=0.05)]
    for dense, indices, clicks in every:
        start = time.perf_counter()
        with counting() as log:
            loss = F.binary_cross_entropy_with_logits(model(dense, indices), clicks)
            loss.backward()
        with counting() as stepped:
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - start)
        run.bytes.append(log.bytes)
        run.stepped.append(stepped.bytes)
    return run


def rows_from_others(indices: Tensor, rows: int) -> int:
    """The rows that the first rank looks up and others own."""
    size = dist.get_world_size()
    mine = indices.chunk(size)[0].unique()
    return int((mine >= -(-rows // size)).sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--categories", type=int, default=8)
    parser.add_argument("--bag", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    placement, every = Placement.all("cpu"), batches(options)
    model = consistent.parallelize(Recommender(options), placement, {"table.weight": S(0), "*": B})
    laid = [tuple(consistent.distribute(x, placement, S(0)) for x in batch) for batch in every]
    run = train(model, laid)
    if dist.get_rank() == 0:
        far = [rows_from_others(indices, options.rows) for _, indices, _ in every]
        print(f"{options.rows:,} rows on {placement.size} ranks: {text(run)}")
        print(
            f"bytes of rank 0 in a step: {median(run.bytes):,.0f} forward and backward, "
            f"{median(run.stepped):,.0f} of the optimizers; it looks up {median(far):,.0f} rows of "
            f"others, each of {options.dim * 4} bytes"
        )
        del model
        alone = train(Recommender(options), every)
        worst = max(abs(a - b) for a, b in zip(run.losses, alone.losses, strict=True))
        print(f"one process: {text(alone)}; losses differ by {worst:.1e} at most")
    dist.barrier()
    dist.destroy_process_group()


def text(run: Run) -> str:
    """The first and last loss, and the time of a step."""
    took = median(run.seconds[1:]) * 1e3
    return f"loss {run.losses[0]:.5f} to {run.losses[-1]:.5f}, {took:.0f} ms a step"


if __name__ == "__main__":
    main()
