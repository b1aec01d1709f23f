"""Programs around optimizers: plain and global parameters together, steps inside backward, tensor
learning rates, sparse gradients, and parameters set from one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from consistent import B, S
from tests.ranks import in_turn, pool
from tests.twins import GRIDS, Laid, compare, net, randn

WAYS: dict[str, dict] = {"single": {"foreach": False}, "foreach": {"foreach": True}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD".split()
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def _loss(at: Laid, leaves: Any, step: int) -> Any:
    x, w, b = leaves
    return ((x @ w).tanh() * at(randn(5, 3, seed=step), S(0)) + b).square().mean()


def plain_and_global(at: Laid) -> Any:
    """One parameter of every model is plain; both kinds are clipped and stepped together."""
    found = []
    for name, make in OPTIMIZERS.items():
        for how in (*WAYS.values(), *([{"fused": True}] if name in FUSED else [])):
            leaves = [*net(at), randn(3, 2, seed=9).requires_grad_()]
            optimizer = make(leaves, lr=0.1, **how)
            for step in range(2):
                optimizer.zero_grad()
                (_loss(at, leaves[:3], step) * 1.0).backward()
                (leaves[3].square().sum() * (step + 1)).backward()
                for foreach in (None, True, False):
                    found.append(nn.utils.clip_grad_norm_(leaves, 0.3, foreach=foreach))
                nn.utils.clip_grad_value_(leaves, 0.1)
                optimizer.step()
            found.append([x.detach().clone() for x in leaves])
    return found


def learning_rates_that_are_tensors(at: Laid) -> Any:
    found = []
    for name in ("SGD", "Adam", "AdamW", "Adagrad"):
        for how in (WAYS["single"], {"fused": True}):
            for rate in (torch.tensor(0.1), at(torch.tensor(0.1).double())):
                leaves = net(at)
                optimizer = OPTIMIZERS[name](leaves, lr=rate, **how)
                for step in range(2):
                    optimizer.zero_grad()
                    _loss(at, leaves, step).backward()
                    optimizer.step()
                    rate.mul_(0.5)
                found.append([x.detach().clone() for x in leaves])
    return found


def steps_inside_backward(at: Laid) -> Any:
    """The memory saver of torch's tutorial: an optimizer for each parameter, stepped as soon as its
    gradient is there."""
    leaves = net(at)
    optimizers = {x: torch.optim.Adam([x], lr=0.1) for x in leaves}

    def step(x: Any) -> None:
        optimizers[x].step()
        optimizers[x].zero_grad()

    for x in leaves:
        x.register_post_accumulate_grad_hook(step)
    for number in range(3):
        _loss(at, leaves, number).backward()
    return [x.grad for x in leaves], list(leaves)


def sparse_gradients(at: Laid) -> Any:
    found = []
    for make in (
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ):
        for entry in (B, S(0), S(1)):
            table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
            table.weight.data.copy_(randn(7, 3))
            at.module(table, {"weight": entry})
            optimizer = make(list(table.parameters()))
            for step in range(3):
                optimizer.zero_grad()
                rows = at(torch.tensor([0, 5, 5, step, 6]), S(0))
                (table(rows).sin() * at(randn(5, 3, seed=step))).sum().backward()
                optimizer.step()
            found.append(table.weight)
    return found


def set_from_one_vector(at: Laid) -> Any:
    """``param.data = ...`` to another layout after a backward."""
    leaves, seen = net(at), []
    for step in range(3):
        _loss(at, leaves, step).backward()
        vector = nn.utils.parameters_to_vector(leaves).detach()
        nn.utils.vector_to_parameters(vector * 0.5, leaves)
        grads = nn.utils.parameters_to_vector([x.grad for x in leaves])
        seen.append((grads, vector, [x.detach().clone() for x in leaves]))
    return seen, F.mse_loss(leaves[0], leaves[0].grad)


CASES = [plain_and_global, learning_rates_that_are_tensors, steps_inside_backward,
         sparse_gradients, set_from_one_vector]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_equals_plain_torch(case: Callable[[Laid], Any]) -> None:
    for world in in_turn(CASES.index(case)):
        pool(world).run(compare, case, GRIDS[world], timeout=120)
