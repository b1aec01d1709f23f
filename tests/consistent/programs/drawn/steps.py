"""Programs on matrices of one shape, statement by statement."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from consistent import B, P, S
from tests.twins import Laid, randn


class Steps:
    """A program on matrices of one shape. What is drawn depends on the seed alone."""

    def __init__(self, rng: random.Random, at: Laid) -> None:
        self.rng, self.at, self.made = rng, at, 0
        self.shape = rng.randint(1, 6), rng.randint(2, 5)
        self.leaves = [self.new().requires_grad_() for _ in range(rng.randint(1, 3))]
        self.live = [x * 1 for x in self.leaves]
        self.found: list[Any] = []

    def new(self, *shape: int) -> Any:
        """A tensor in a drawn layout."""
        self.made += 1
        laid = self.rng.choice([(B, B), (S(0), B), (S(0), P), (P, S(0)), (P, B), (S(0), S(0))])
        if len(shape or self.shape) > 1:
            laid = self.rng.choice([laid, (S(1), B), (S(0), S(1)), (S(1), S(0)), (S(1), P)])
        return self.at(randn(*(shape or self.shape), seed=self.made), *laid)

    def any(self) -> Any:
        return self.rng.choice(self.live[-4:])

    def run(self, statements: Sequence[Callable[[Steps], None]], count: int) -> Any:
        for _ in range(count):
            self.rng.choice(statements)(self)
        total: Any = sum(
            (x * randn(*self.shape, seed=77 + i)).sum() for i, x in enumerate(self.live)
        )
        total.sin().backward()
        return self.found, [x.detach() for x in self.live], [x.grad for x in self.leaves]


def compute(steps: Steps) -> None:
    x, y = steps.any(), steps.any()
    ops = [
        lambda: x.sin() * y, lambda: x + y.mean(0), lambda: x.softmax(1), lambda: x @ (y.T @ x),
        lambda: x - y.amax(1, keepdim=True), lambda: torch.where(x > 0, x, y),
        lambda: x.cumsum(0).tanh(), lambda: x.flip(1) * 0.5, lambda: x / (1 + y.abs()),
    ]  # fmt: skip
    steps.live.append(steps.rng.choice(ops)().tanh())
