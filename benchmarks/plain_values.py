"""What it costs that ranks compare the plain tensors that meet global ones.

    python benchmarks/plain_values.py            2 ranks, a small GPT whose batch is plain

A step is timed with the comparison and without it in turn, in one run: a process's first step,
where plans are made and tensors compared, and later ones, where nothing is compared.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

import consistent
from benchmarks.gpt import GPT, VOCAB, batch
from consistent import Placement
from consistent.dispatch.plans.plan import clear_plans
from consistent.movement import plain_values
from tests.ranks import pool

ROUNDS, LATER = 7, 6


def times(rank: int, layers: int) -> dict[str, list[float]]:
    """Seconds of first and later steps, with and without."""
    GPT.layers = layers
    torch.manual_seed(0)
    model = consistent.parallelize(GPT(), Placement.all("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens, targets = batch()
    found: dict[str, list[float]] = {}
    for turn in range(2 * ROUNDS + 2):
        on = turn % 2 == 0
        plain_values._is_enabled = on
        clear_plans()
        for step in range(1 + LATER):
            start = time.perf_counter()
            logits = model(tokens)
            F.cross_entropy(logits.view(-1, VOCAB), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            key = f"{'first' if step == 0 else 'later'} {'with' if on else 'without'}"
            if turn > 1:
                found.setdefault(key, []).append(time.perf_counter() - start)
    plain_values._is_enabled = True
    return found


def main() -> None:
    """Print medians and ratios."""
    found = pool(2).run(times, 2, timeout=900)[0]
    for when in ("first", "later"):
        on, off = (statistics.median(found[f"{when} {way}"]) for way in ("with", "without"))
        print(f"{when} step: {on * 1e3:.1f} ms with, {off * 1e3:.1f} ms without: {on / off:.3f}x")


if __name__ == "__main__":
    main()
