"""Random op of a recorded program, which draws new numbers in each run."""

from __future__ import annotations

from typing import Any

import torch


class RandomOp:
    """Callable that runs a recorded random op of this library, with new random numbers in each run.

    The op draws from a counter-based generator, which makes its numbers from a seed and a counter.
    Each run passes the present seed, and the counter at which the op's segment begins; the op adds
    a fixed offset to this counter.

    Args:
        func: the op.
        values: its arguments.
        at: index of the counter among the arguments; the seed is before it.
        offset: number of draws between the start of the segment and this op.
        filled: whether the op writes the numbers into its first argument.
    """

    def __init__(self, func: Any, values: list[Any], at: int, offset: int, filled: bool) -> None:
        self._func, self._counter_index, self._offset, self._in_place = func, at, offset, filled
        self._values = [None if isinstance(v, torch.Tensor) else v for v in values]
        self._tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]

    def __call__(self, seed: int, counter: int, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        values: list[Any] = list(self._values)
        for i, x in zip(self._tensors, xs, strict=True):
            values[i] = x
        values[self._counter_index - 1], values[self._counter_index] = seed, counter + self._offset
        if self._in_place:
            # The custom op ``drawn`` must not modify its inputs, so the numbers go into a new
            # tensor.
            values[0] = torch.empty_like(values[0])
            self._func(*values)
            return [values[0]]
        return [self._func(*values)]
