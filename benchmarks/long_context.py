"""Causal attention of a long sequence in parts: time beside a lone rank, memory, and the work of
each rank.

    python benchmarks/long_context.py time          8,192 tokens, forward and backward, 2 ranks
    python benchmarks/long_context.py memory        16,384 tokens: the most that is held at once
    python benchmarks/long_context.py work          scores that each of 2, 4 and 8 ranks computes

8 heads of 64, float32, one thread a rank. Times are medians; a lone rank and each cut come in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import consistent
from consistent import Placement, S
from consistent.forms.families.layers.sight import blocks, single_document
from mirrored.transports.default import current
from tests.ranks import pool

HEADS, WIDTH = 8, 64
CUTS = {"zigzag": S(2, cut="zigzag"), "contiguous": S(2)}
attention: Any = F.scaled_dot_product_attention


def operands(tokens: int, placement: Placement, sbp: Any) -> list[Any]:
    """Query, keys and values, by one rank's numbers."""
    made = [torch.randn(1, HEADS, tokens, WIDTH) for _ in range(3)]
    return [consistent.distribute(x, placement, sbp).requires_grad_() for x in made]


def step(given: list[Any], seed: Any) -> None:
    """Forward and backward."""
    for x in given:
        x.grad = None
    attention(*given, is_causal=True).backward(seed)


# -- time ------------------------------------------------------------------------------------------


def timed(rank: int, tokens: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, processor's seconds) of each repetition, by what runs."""
    torch.set_num_threads(1)
    line = Placement("cpu", range(2))
    laid = {name: operands(tokens, line, sbp) for name, sbp in CUTS.items()}
    seeds = {name: torch.ones_like(xs[0]).detach() for name, xs in laid.items()}
    alone = [torch.randn(1, HEADS, tokens, WIDTH).requires_grad_() for _ in range(3)]
    ones = torch.ones(1, HEADS, tokens, WIDTH)
    found: dict[str, list[tuple[float, float]]] = {"lone rank": [], **{name: [] for name in CUTS}}
    for _ in range(repeats):
        for name in found:
            current().gather_objects(None, (0, 1))
            start, worked = time.perf_counter(), time.process_time()
            if name != "lone rank":
                step(laid[name], seeds[name])
            elif rank == 0:
                step(alone, ones)
            found[name].append((time.perf_counter() - start, time.process_time() - worked))
    return found


def show_times(tokens: int, repeats: int) -> None:
    """Print the time of each, and its part of a lone rank's."""
    found = pool(2).run(timed, tokens, repeats, timeout=600)
    print(f"{tokens:,} tokens, forward and backward, {repeats} times")
    for i, kind in enumerate(("passed", "worked")):
        alone = 0.0
        for name in found[0]:
            ranks = found[:1] if name == "lone rank" else found
            each = [max(t[i] for t in times) for times in zip(*(r[name] for r in ranks))]
            part = statistics.median(each)
            alone = alone or part
            shown = " ".join(f"{t:.2f}" for t in each)
            print(f"{kind} {name:12} {part:6.2f} s  {part / alone:5.2f} of a lone rank   ({shown})")


# -- memory ----------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """The most bytes that are held at once of what is given and of what ops make, and the largest
    matrix of scores."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = self.scores = 0
        self._known: set[int] = set()
        for x in given:
            self._enter(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._enter(x)
        return out

    def _enter(self, x: torch.Tensor) -> None:
        if x.ndim >= 2:  # rows and keys
            self.scores = max(self.scores, x.shape[-1] * x.shape[-2] * (x.shape[-1] > WIDTH))
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._leave, key, storage.nbytes())

    def _leave(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def held(rank: int, tokens: int, n: int) -> tuple[int, int]:
    """(the most bytes held in a step with its operands, rows x keys of the largest matrix)."""
    given: list[Any] = [torch.randn(1, HEADS, tokens, WIDTH).requires_grad_() for _ in range(3)]
    if n > 1:
        given = operands(tokens, Placement("cpu", range(n)), S(2, cut="zigzag"))
    seed = torch.ones_like(given[0]).detach()
    own: list[Any] = [*given, seed]
    own = [x.to_local() for x in own] if n > 1 else own
    with Held(own) as watched:
        step(given, seed)
    return watched.most, watched.scores


def show_memory(tokens: int) -> None:
    """Print what a lone rank holds, and what each of 2 and 4 ranks does."""
    (lone,) = pool(1).run(held, tokens, 1, timeout=600)
    print(f"{tokens:,} tokens: a lone rank holds {lone[0] / 1e6:,.0f} MB at most")
    for n in (2, 4):
        found = pool(n).run(held, tokens, n, timeout=600)
        most, scores = (max(column) for column in zip(*found, strict=True))
        print(f"{n} ranks: {most / 1e6:,.0f} MB each, {most / lone[0]:.2f} of it; the largest "
              f"matrix of rows and keys has {scores:,} elements")  # fmt: skip
        pool(n).close()


# -- work ------------------------------------------------------------------------------------------


def show_work(tokens: int) -> None:
    """Print the scores of the busiest rank beside the mean."""
    sight = single_document(tokens, tokens, causal=True)
    for n in (2, 4, 8):
        for name, entry in CUTS.items():
            held = [entry.runs(tokens, n, k) for k in range(n)]
            each = [
                sum(_scores(block) for keys in held for block in blocks(sight, rows, keys))
                for rows in held
            ]
            print(f"{n} ranks {name:12} busiest {max(each) * n / sum(each):.3f} of the mean")


def _scores(block: Any) -> float:
    rows, keys = block.rows[1] - block.rows[0], block.keys[1] - block.keys[0]
    return rows * (rows + 1) / 2 if block.triangle else rows * keys


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["time", "memory", "work"])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.what == "time":
        show_times(given.tokens or 8192, given.repeats)
    elif given.what == "memory":
        show_memory(given.tokens or 16384)
    else:
        show_work(given.tokens or 8192)


if __name__ == "__main__":
    main()
