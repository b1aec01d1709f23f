"""Time of the fused kernels beside the same expressions of torch, one thread, in turn:

    python benchmarks/kernels.py [--device cuda] [--compile] [--dtypes bfloat16 float32]

The ratio is torch / ours: above 1 ours is faster. --compile adds torch.compile. On CUDA it also
prints the bandwidth of ours, for the bytes that the expression needs (inputs read once, results
written once), and that of a copy that moves as many bytes, in the same rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device_time import Run, copying, medians
from consistent.forms.native import load as native

ROUNDS = 15
VOCABULARY, RANKS, PARTS = 131072, 8, 4
HELD = VOCABULARY // RANKS


@dataclass(frozen=True)
class Sizes:
    """parts [rows, columns]; logits [tokens, HELD]; table [HELD, width], ``looked_up`` indices."""

    rows: int
    columns: int
    tokens: int
    looked_up: int
    width: int


# On CUDA no operand fits into a cache.
SIZES = {
    "cpu": Sizes(2048, 2048, 512, 4096, 1024),
    "cuda": Sizes(8192, 4096, 8192, 65536, 4096),
}


@dataclass(frozen=True)
class Case:
    """One expression: ours, torch's as a function of tensors, those tensors, and the bytes that
    must be read and written."""

    name: str
    ours: Run
    theirs: Callable[..., object]
    tensors: tuple[Tensor, ...]
    nbytes: int


def cases(dtype: torch.dtype, device: str, sizes: Sizes) -> Iterator[Case]:
    """All cases."""
    for group in (reductions, losses, lookups):
        yield from group(dtype, device, sizes)


def reductions(dtype: torch.dtype, device: str, sizes: Sizes) -> Iterator[Case]:
    """Sums of tensors that stand in for those of other ranks, and the ops that follow."""

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    parts = [made(sizes.rows, sizes.columns) for _ in range(PARTS)]
    residual, weight, bias = made(sizes.rows, sizes.columns), *made(2, sizes.columns)

    def ours(**epilogue: object) -> Run:
        return lambda: native.reduce_shards(parts, 0, 0, sizes.rows, **epilogue)[0]

    def total(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a.float() + b.float() + c.float() + d.float()).to(dtype)

    shape, more = (sizes.columns,), {"residual": residual}
    rms = {"norm": "rms", "normalized": 1, "weight": weight, "eps": 1e-5}
    layer = rms | {"norm": "layer", "norm_bias": bias}

    def rms_norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, shape, weight, 1e-5)

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape, weight, bias)

    table: dict[str, tuple[dict[str, object], Callable[..., object]]] = {
        "sum of 4": ({}, total),
        "sum, scale": ({"scale": 0.25}, lambda *p: total(*p) * 0.25),
        "sum, bias": ({"bias": bias}, lambda *p: total(*p) + bias),
        "sum, residual": (more, lambda *p: total(*p) + residual),
        "sum, bias, residual": (more | {"bias": bias}, lambda *p: total(*p) + bias + residual),
        "sum, relu": ({"activation": "relu"}, lambda *p: F.relu(total(*p))),
        "sum, gelu": ({"activation": "gelu"}, lambda *p: F.gelu(total(*p))),
        "sum, silu": ({"activation": "silu"}, lambda *p: F.silu(total(*p))),
        "sum, rms_norm": (rms, lambda *p: rms_norm(total(*p))),
        "sum, layer_norm": (layer, lambda *p: layer_norm(total(*p))),
        "sum, residual, rms_norm": (more | rms, lambda *p: rms_norm(total(*p) + residual)),
        "sum, residual, layer_norm": (more | layer, lambda *p: layer_norm(total(*p) + residual)),
    }
    if dtype != torch.float32:
        table["sum, cast to float32"] = (
            {"dtype": torch.float32},
            lambda a, b, c, d: a.float() + b.float() + c.float() + d.float(),
        )
    for name, (epilogue, reference) in table.items():
        written = residual.numel() * torch.float32.itemsize if "cast" in name else residual.nbytes
        nbytes = residual.nbytes * (PARTS + ("residual" in name)) + written
        yield Case(name, ours(**epilogue), reference, tuple(parts), nbytes)


def losses(dtype: torch.dtype, device: str, sizes: Sizes) -> Iterator[Case]:
    """What one rank of eight does for its part of the vocabulary."""
    tokens = sizes.tokens
    x = torch.randn(tokens, HELD, device=device).to(dtype)
    target = torch.randint(0, VOCABULARY, (tokens,), device=device)
    rows = torch.rand(4, tokens, device=device)
    rows[2] = 0  # no smoothing
    place = target.clamp(0, HELD - 1).unsqueeze(1)

    def said(x: Tensor) -> Tensor:
        wide = x.float()
        largest = wide.amax(1, True)
        picked = torch.where(target < HELD, wide.gather(1, place)[:, 0], 0)
        return torch.stack([largest[:, 0], (wide - largest).exp().sum(1), picked])

    def slope(x: Tensor) -> Tensor:
        made = (x.float() - rows[0, :, None]).exp() * rows[1, :, None]
        own = torch.where(target < HELD, rows[3], 0).unsqueeze(1)
        return made.scatter_add(1, place, -own).to(dtype)

    yield Case(
        "cross-entropy",
        lambda: native.split_cross_entropy(x, target, None, 1, 0, False),
        said,
        (x,),
        x.nbytes + target.nbytes + 3 * tokens * torch.float32.itemsize,
    )
    yield Case(
        "cross-entropy, backward",
        lambda: native.split_cross_entropy_backward(x, target, rows, None, 1, 0),
        slope,
        (x,),
        2 * x.nbytes + target.nbytes + rows.nbytes,
    )


def lookups(dtype: torch.dtype, device: str, sizes: Sizes) -> Iterator[Case]:
    """A rank of eight looks up the rows that it holds, and computes their gradient."""
    table = torch.randn(HELD, sizes.width, device=device).to(dtype)
    index = torch.randint(0, VOCABULARY, (sizes.looked_up,), device=device)
    grad = torch.randn(sizes.looked_up, sizes.width, device=device).to(dtype)
    outside = (index < 0) | (index >= HELD)
    own = grad.nbytes * int((~outside).sum()) // sizes.looked_up  # bytes of the rows held here

    def look(table: Tensor) -> Tensor:
        local = torch.where(outside, 0, index)
        return F.embedding(local, table).masked_fill(outside.unsqueeze(1), 0)

    def add(grad: Tensor) -> Tensor:
        local = torch.where(outside, 0, index)
        kept = grad.masked_fill(outside.unsqueeze(1), 0)
        return torch.ops.aten.embedding_dense_backward(kept, local, HELD, -1, False)

    yield Case(
        "embedding",
        lambda: native.masked_embedding(table, index, 0),
        look,
        (table,),
        own + grad.nbytes + index.nbytes,
    )
    yield Case(
        "embedding, backward",
        lambda: native.masked_embedding_backward(grad, index, HELD, 0),
        add,
        (grad,),
        own + table.nbytes + index.nbytes,
    )


def show(case: Case, dtype: torch.dtype, device: str, compiled: bool) -> None:
    """One line of the table."""
    runs: dict[str, Run] = {"ours": case.ours, "torch": lambda: case.theirs(*case.tensors)}
    if compiled:
        fast = torch.compile(case.theirs)
        runs["compiled"] = lambda: fast(*case.tensors)
    if device == "cuda":
        runs["copy"] = copying(case.nbytes, device)
    with torch.no_grad():
        times = medians(runs, device, ROUNDS)
    ours, copy = times.pop("ours"), times.pop("copy", None)
    digits = 2 if device == "cpu" else 3
    line = f"{case.name:28}{str(dtype).removeprefix('torch.'):10}{ours * 1e3:10.{digits}f}"
    line += "".join(f"{t * 1e3:10.{digits}f}{t / ours:8.2f}" for t in times.values())
    if copy is not None:
        speeds = [case.nbytes / t / 1e9 for t in (ours, copy)]
        line += f"{speeds[0]:10.0f}{speeds[1]:12.0f}{copy / ours:10.1%}"
    print(line, flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true")
    known = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", default=known, choices=known)
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    heads = {"ours, ms": 10, "torch, ms": 10, "ratio": 8}
    heads |= {"compiled": 10, "ratio ": 8} if asked.compile else {}
    heads |= {"GB/s": 10, "copy, GB/s": 12, "of copy": 10} if asked.device == "cuda" else {}
    print(" " * 38 + "".join(f"{head.strip():>{width}}" for head, width in heads.items()))
    for name in asked.dtypes:
        dtype = getattr(torch, name)
        for case in cases(dtype, asked.device, SIZES[asked.device]):
            show(case, dtype, asked.device, asked.compile)


if __name__ == "__main__":
    main()
