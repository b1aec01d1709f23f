"""Gradient accumulation over micro-batches that run one after another.

Gradients add up locally and are summed over the ranks with the last micro-batch only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..autograd.leaves import no_sync
from ..pipeline.micro_batches import join_results, micro_batch_ranges, narrow_batch, rows_of
from .backward_calls import intercept_backward


def run_micro_batches(
    name: str,
    build: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    count: int,
    scale: Callable[[Any], Any],
) -> Any:
    """Run ``build`` on each of ``count`` micro-batches, one after another, and join the results.

    ``Graph`` uses it to accumulate gradients without pipeline stages. The loss of a micro-batch is
    weighted by its share of the rows, and passed through ``scale`` before backward.

    Args:
        name: the graph's name, for errors.
        build: the function that computes a step, and calls ``backward`` on its loss.
        args, kwargs: its arguments for the whole batch. Tensors with as many rows (dim 0) as the
            batch are cut along dim 0; all others are passed whole to each micro-batch.
        count: the number of micro-batches.
        scale: (loss) -> the loss times the factor of the gradient scaler.

    Raises:
        ValueError: the batch cannot be cut, or the results cannot be joined.
    """
    rows = rows_of(name, (args, kwargs))
    parts = micro_batch_ranges(name, rows, count)
    results = []
    for k, (start, size) in enumerate(parts):
        part_args, part_kwargs = narrow_batch((args, kwargs), rows, start, size)
        weight = size / rows

        def backward(loss: Any, run: Callable[[Any], None], weight: float = weight) -> None:
            run(scale(loss * weight))

        # Only the last micro-batch sums gradients over ranks; the others add up locally.
        with intercept_backward(backward), no_sync() if k < count - 1 else nullcontext():
            results.append(build(*part_args, **part_kwargs))
    return join_results(name, results, [size for _, size in parts])
