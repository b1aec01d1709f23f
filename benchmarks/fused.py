"""Messages fused with the ops beside them, in compiled steps. torchrun is needed.

    torchrun --standalone --nproc_per_node 2 benchmarks/fused.py [--rounds 15] [--backend ops]

Each figure is the time of the program as it is divided by that of the fused one, measured in turn
in one run; above 1 the fused one is faster. Two figures: the medians of all rounds, and the least
of each. Rows of 1024 columns; the size is that of what a rank gives to the sum. Under "product" a
product of [rows, 1024 / ranks] by [1024 / ranks, 1024] is summed, or one of gathered rows is made.
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
import torch.nn.functional as F

import consistent
from benchmarks import process_group
from consistent import B, Placement, S

COLUMNS = 1024
Tail = Callable[[Any, Any, Any, Any], Any]  # (sum, bias, residual, weight) -> result
TAILS: dict[str, Tail] = {
    "scale": lambda y, b, r, w: y * 0.5,
    "bias": lambda y, b, r, w: y + b,
    "residual": lambda y, b, r, w: y + r,
    "bias, residual": lambda y, b, r, w: y + b + r,
    "relu": lambda y, b, r, w: torch.relu(y),
    "gelu": lambda y, b, r, w: F.gelu(y),
    "silu": lambda y, b, r, w: F.silu(y),
    "bias, gelu": lambda y, b, r, w: F.gelu(y + b),
    "layer_norm": lambda y, b, r, w: F.layer_norm(y, (COLUMNS,), w, b),
    "residual, layer_norm": lambda y, b, r, w: F.layer_norm(y + r, (COLUMNS,), w, b),
    "rms_norm": lambda y, b, r, w: F.rms_norm(y, (COLUMNS,), w, 1e-5),
    "residual, rms_norm": lambda y, b, r, w: F.rms_norm(y + r, (COLUMNS,), w, 1e-5),
    "cast": lambda y, b, r, w: y.float(),
}


def ratios(ways: list[Callable[[], Any]], rounds: int) -> tuple[float, float]:
    """The time of the first way by that of the second: of medians, and of the least."""
    taken: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for times, run in zip(taken, ways, strict=True):
            dist.barrier()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    first, second = (times[1:] for times in taken)
    return statistics.median(first) / statistics.median(second), min(first) / min(second)


def compiled(step: Callable[..., Any], backend: str, args: tuple) -> list[Callable[[], Any]]:
    """The step as a program, and as a fused one."""
    ways = []
    for fuse in (False, True):
        made: Any = consistent.compile(step, backend=backend, fuse=fuse, fullgraph=True)
        for _ in range(3):
            made(*args)
        fused = [c for c in made.programs[-1].program.messages() if ", " in c.kind]
        assert bool(fused) == fuse, made.show()
        ways.append(lambda made=made: made(*args))
    return ways


def partial(rows: int, placement: Placement, dtype: torch.dtype) -> Any:
    """What ranks sum: a tensor that is P and no product."""
    given = torch.randn(rows, COLUMNS, dtype=dtype)
    return consistent.from_local(given, placement, consistent.P)


def sums(given: argparse.Namespace, placement: Placement, say: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for target in (B, S(0)):
            for name, tail in TAILS.items():
                if name not in given.tails or (name == "cast" and dtype is torch.float32):
                    continue
                cells = []
                for kib in given.kib:
                    rows = kib * 1024 // (COLUMNS * dtype.itemsize)
                    bias, weight = (
                        consistent.distribute(torch.randn(COLUMNS, dtype=dtype), placement, B)
                        for _ in range(2)
                    )
                    residual = consistent.distribute(
                        torch.randn(rows, COLUMNS, dtype=dtype), placement, target
                    )

                    def step(x: Any, b: Any, r: Any, w: Any, tail=tail, target=target) -> Any:
                        return tail(x.to_global(sbp=target), b, r, w)

                    args = (partial(rows, placement, dtype), bias, residual, weight)
                    with torch.no_grad():
                        ways = compiled(step, given.backend, args)
                        cells.append("{:.2f} {:.2f}".format(*ratios(ways, given.rounds)))
                kind = "all_reduce" if target is B else "reduce_scatter"
                what = f"{kind}, {name}, {str(dtype).removeprefix('torch.')}"
                say(f"| {what} |", *(f"{cell} |" for cell in cells))


def products(given: argparse.Namespace, placement: Placement, say: Any) -> None:
    for name in ("mm, all_reduce", "mm, reduce_scatter", "join, mm"):
        cells = []
        for kib in given.kib:
            rows = kib * 1024 // (COLUMNS * 4)
            first = name.startswith("mm")
            x = consistent.randn(rows, COLUMNS, placement=placement, sbp=S(1) if first else S(0))
            w = consistent.randn(COLUMNS, COLUMNS, placement=placement, sbp=S(0) if first else S(1))
            target = S(0) if "scatter" in name else B

            def step(x: Any, w: Any, first=first, target=target) -> Any:
                return (x @ w).to_global(sbp=target) if first else x.to_global(sbp=target) @ w

            with torch.no_grad():
                ways = compiled(step, given.backend, (x, w))
                cells.append("{:.2f} {:.2f}".format(*ratios(ways, given.rounds)))
        say(f"| {name} |", *(f"{cell} |" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="ops", choices=["ops", "inductor"])
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--tails", nargs="+", default=list(TAILS))
    parser.add_argument("--only", nargs="+", default=["sum", "product"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    process_group.start(given.device)
    placement = Placement.all(given.device)
    say = print if dist.get_rank() == 0 else lambda *args, **kwargs: None
    say(f"| {dist.get_world_size()} ranks, {given.backend} |", *(f"{n} KiB |" for n in given.kib))
    say("| --- " * (len(given.kib) + 1) + "|")
    if "sum" in given.only:
        sums(given, placement, say)
    if "product" in given.only:
        products(given, placement, say)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
