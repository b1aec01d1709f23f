"""Time of the fused kernels beside the same expressions of torch, one thread, in turn:
python benchmarks/kernels.py [cpu|cuda] [--compile]

The ratio is torch / ours: above 1 ours is faster. --compile adds torch.compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from consistent.local import _native as native

ROUNDS = 15
ROWS, COLUMNS = 2048, 2048
TOKENS, VOCABULARY, RANKS = 512, 131072, 8
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One expression: ours, torch's as a function of tensors, and those tensors."""

    name: str
    ours: Run
    theirs: Callable[..., object]
    tensors: tuple[Tensor, ...]


def reductions(dtype: torch.dtype, device: str) -> Iterator[Case]:
    parts = [torch.randn(ROWS, COLUMNS, device=device).to(dtype) for _ in range(4)]
    residual = torch.randn(ROWS, COLUMNS, device=device).to(dtype)
    weight, bias = (torch.randn(COLUMNS, device=device).to(dtype) for _ in range(2))

    def ours(**epilogue: object) -> Run:
        return lambda: native.reduce_shards(parts, 0, 0, ROWS, **epilogue)[0]

    def total(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a.float() + b.float() + c.float() + d.float()).to(dtype)

    shape, norm = (COLUMNS,), {"normalized": 1, "weight": weight}
    table: dict[str, tuple[Run, Callable[..., object]]] = {
        "sum of 4": (ours(), total),
        "sum, bias, residual": (
            ours(bias=bias, residual=residual),
            lambda *p: total(*p) + bias + residual,
        ),
        "sum, gelu": (ours(activation="gelu"), lambda *p: F.gelu(total(*p))),
        "sum, silu": (ours(activation="silu"), lambda *p: F.silu(total(*p))),
        "sum, residual, rms_norm": (
            ours(residual=residual, norm="rms", **norm),
            lambda *p: F.rms_norm(total(*p) + residual, shape, weight),
        ),
        "sum, residual, layer_norm": (
            ours(residual=residual, norm="layer", norm_bias=bias, **norm),
            lambda *p: F.layer_norm(total(*p) + residual, shape, weight, bias),
        ),
    }
    for name, (run, reference) in table.items():
        yield Case(name, run, reference, tuple(parts))


def losses(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """What one rank of eight does for its part of the vocabulary."""
    held = VOCABULARY // RANKS
    x = torch.randn(TOKENS, held, device=device).to(dtype)
    target = torch.randint(0, VOCABULARY, (TOKENS,), device=device)
    rows = torch.rand(4, TOKENS, device=device)

    def said(x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        largest = wide.amax(1, True)
        place = target.clamp(0, held - 1).unsqueeze(1)
        return largest, (wide - largest).exp().sum(1), wide.gather(1, place)

    def slope(x: Tensor) -> Tensor:
        made = (x.float() - rows[0, :, None]).exp() * rows[1, :, None]
        own = torch.where(target < held, rows[3], 0).unsqueeze(1)
        return made.scatter_add(1, target.clamp(0, held - 1).unsqueeze(1), -own).to(dtype)

    yield Case(
        "cross-entropy",
        lambda: native.split_cross_entropy(x, target, None, 1, 0, False),
        said,
        (x,),
    )
    yield Case(
        "cross-entropy, backward",
        lambda: native.split_cross_entropy_backward(x, target, rows, None, 1, 0),
        slope,
        (x,),
    )


def lookups(dtype: torch.dtype, device: str) -> Iterator[Case]:
    held, tokens = VOCABULARY // RANKS, 4096
    table = torch.randn(held, 1024, device=device).to(dtype)
    index = torch.randint(0, VOCABULARY, (tokens,), device=device)
    grad = torch.randn(tokens, 1024, device=device).to(dtype)
    outside = (index < 0) | (index >= held)

    def look(table: Tensor) -> Tensor:
        local = torch.where(outside, 0, index)
        return F.embedding(local, table).masked_fill(outside.unsqueeze(1), 0)

    def add(grad: Tensor) -> Tensor:
        local = torch.where(outside, 0, index)
        kept = grad.masked_fill(outside.unsqueeze(1), 0)
        return torch.ops.aten.embedding_dense_backward(kept, local, held, -1, False)

    yield Case("embedding", lambda: native.masked_embedding(table, index, 0), look, (table,))
    yield Case(
        "embedding, backward",
        lambda: native.masked_embedding_backward(grad, index, held, 0),
        add,
        (grad,),
    )


def milliseconds(runs: list[Run], device: str) -> list[float]:
    """The median of each, taken in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(ROUNDS + 2):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_ >= 2:
                taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def show(case: Case, dtype: torch.dtype, device: str, compiled: bool) -> None:
    runs: list[Run] = [case.ours, lambda: case.theirs(*case.tensors)]
    if compiled:
        fast = torch.compile(case.theirs)
        runs.append(lambda: fast(*case.tensors))
    with torch.no_grad():
        ours, *others = milliseconds(runs, device)
    ratios = "".join(f"{t:10.2f}{t / ours:8.2f}" for t in others)
    print(f"{case.name:28}{str(dtype).removeprefix('torch.'):10}{ours:10.2f}{ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    heads = ["ours, ms", "torch, ms", "ratio"] + ["compiled", "ratio"] * asked.compile
    widths = [10, 10, 8, 10, 8]
    print(" " * 38 + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=False)))
    for dtype in (torch.float32, torch.bfloat16):
        for group in (reductions, losses, lookups):
            for case in group(dtype, asked.device):
                show(case, dtype, asked.device, asked.compile)


if __name__ == "__main__":
    main()
