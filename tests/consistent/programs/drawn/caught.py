"""Errors that values cause, and that the program catches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from consistent import B, S
from tests.consistent.dispatch.running.raising import CASES
from tests.consistent.torch_patches.functions_of_users import make

from .steps import Steps

ERRORS = (RuntimeError, IndexError, ZeroDivisionError, ValueError)


def caught(steps: Steps) -> None:
    """An op that one row makes raise, on whichever rank it lies, or none does."""
    rng, (rows, columns) = steps.rng, steps.shape
    bad, at = rng.random() < 0.6, rng.randrange(4)
    eye = torch.eye(3).double().repeat(4, 1, 1)
    index = torch.arange(4) % rows
    index[at] = rows + 5 if bad else 0
    if bad:
        eye[at] = 0
    chance = torch.full((4,), 0.0)
    chance[at] = 2.0 if bad else 1.0
    count = torch.ones(4, dtype=torch.long)
    count[at] = 0 if bad else 2
    lay = lambda x: steps.at(x, rng.choice([S(0), B]))  # noqa: E731
    x = steps.any().detach()
    table, values = steps.new(), steps.new(4, columns)
    ops: list[Callable[[], Any]] = [
        lambda: torch.linalg.inv(lay(eye)), lambda: torch.linalg.cholesky(lay(eye)),
        lambda: torch.linalg.solve(lay(eye), lay(torch.ones(4, 3).double())),
        lambda: F.embedding(lay(index), table), lambda: table[lay(index)],
        lambda: table.index_select(0, lay(index)), lambda: torch.take(table, lay(index * columns)),
        lambda: table.clone().index_add(0, lay(index), values),
        lambda: F.cross_entropy(values, lay(index % 1 if not bad else index)),
        lambda: torch.bernoulli(lay(chance)), lambda: 7 // lay(count),
        lambda: lay(count) % lay(count),
        lambda: F.binary_cross_entropy(lay(chance), lay(torch.ones(4))),
        lambda: torch.gather(values, 0, lay(index[:, None] * (1 if bad else 0))),
    ]  # fmt: skip
    one = partial(_one_of_all, steps, bad) if rng.random() < 0.5 else rng.choice(ops)
    mode = rng.choice([nullcontext, nullcontext, torch.no_grad, torch.inference_mode])
    outside = rng.random() < 0.5
    try:
        with mode():
            try:
                steps.found.append(one().double().sum().item())
            except ERRORS:
                if outside:
                    raise
                steps.found.append(("raised", x.mean().item()))
    except ERRORS:
        steps.found.append("raised")
    steps.found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    steps.found.append(x.sum().item())


def _one_of_all(steps: Steps, bad: bool) -> Any:
    """A call of any op that raises by value, with operands in layouts of their own."""
    rng = steps.rng
    case = rng.choice(CASES)
    given = []
    for x in case.given(bad):
        entries = [rng.choice([B, *map(S, range(x.ndim))]) for _ in range(2)]
        given.append(steps.at(x, *entries))
    case.run(*given)  # eigenvectors have a sign of their own
    return torch.zeros(())


def caught_in_backward(steps: Steps) -> None:
    """A function of the user's that refuses values forward or in backward, on all ranks."""
    rng, x = steps.rng, steps.any()
    most, forward, sent = rng.choice([0.2, 9.0]), rng.random() < 0.3, steps.new()

    def check(x: Any) -> Any:
        if x.abs().max() > most:
            raise ValueError("too large")
        return x

    refuses = make(
        lambda ctx, x: check(x) * 2 if forward else x * 2,
        lambda ctx, g: g if forward else check(g),
    )
    leaf = x.detach().clone().requires_grad_()
    try:
        (found,) = torch.autograd.grad((refuses.apply(leaf) * sent).sum(), leaf)
        steps.found.append(found)
    except ValueError:
        steps.found.append("raised")
    steps.live.append(x.sin())
