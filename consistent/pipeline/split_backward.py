"""Backward in two halves: gradients of a stage's inputs, which the stage before waits for, and
later those of its parameters.

```
            g1          g2          g3
input <--- op1 <------ op2 <------ op3 <--- output        first half: along the inputs' path
            |g1         |g2         |g3
            w1          w2          w3                     second half: from the kept g1, g2, g3
```
"""

from __future__ import annotations

from typing import Any

import torch


class SplitBackward:
    """One backward, from ``roots`` with the gradients ``seeds``, to the plain leaves ``inputs``
    first."""

    def __init__(self, roots: list[Any], seeds: list[Any], inputs: list[torch.Tensor]) -> None:
        self._roots, self._seeds, self._inputs = roots, seeds, inputs

    def of_inputs(self) -> list[torch.Tensor | None]:
        """The gradients of the inputs; None of those that backward does not reach."""
        if not self._inputs or not self._roots:
            return [None for _ in self._inputs]
        seeds = [seed if seed is not None else None for seed in self._seeds]
        found = torch.autograd.grad(
            self._roots, self._inputs, seeds, retain_graph=True, allow_unused=True
        )
        return list(found)

    def of_weights(self) -> None:
        """Add the gradients of parameters to theirs."""
        if self._roots:
            torch.autograd.backward(self._roots, self._seeds)
        for x in self._inputs:
            x.grad = None
