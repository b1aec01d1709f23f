"""Autograd on global tensors gives what it gives on plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consistent import B, P, S
from tests.ranks import in_turn, pool
from tests.twins import GRIDS, Laid, compare, net, randn

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@case
def backward(at: Laid) -> Any:
    x, w, b = net(at)
    F.mse_loss(torch.tanh(x @ w + b), at(randn(5, 3, seed=3), S(0))).backward()
    return x.grad, w.grad, b.grad


@case
def losses_that_are_partial_split_and_broadcast(at: Laid) -> Any:
    found = []
    for entry in (P, S(0), B):
        for second in (P, S(0), B):
            x = at.leaf(randn(4, 1), entry, second)
            (x * x).sum().backward()
            found.append(x.grad)
            y = at.leaf(randn(1), entry, second)
            (y * 3).backward()
            found.append(y.grad)
    return found


@case
def grad_function(at: Laid) -> Any:
    x, w, b = net(at)
    loss = (x @ w + b).square().sum()
    return torch.autograd.grad(loss, [x, w, b], retain_graph=True), torch.autograd.grad(loss, w)


@case
def grad_of_an_unused_input(at: Laid) -> Any:
    x, w, _ = net(at)
    return torch.autograd.grad((x * 2).sum(), [x, w], allow_unused=True)


@case
def grad_with_given_outputs(at: Laid) -> Any:
    x, w, _ = net(at)
    y = x @ w
    one = torch.autograd.grad(y, [x, w], grad_outputs=randn(5, 3, seed=4), retain_graph=True)
    laid = [at(randn(5, 3, seed=4), *e) for e in ((S(0), B), (S(1), S(0)), (P, B), (B, P))]
    return one, [torch.autograd.grad(y, [x, w], grad_outputs=g, retain_graph=True) for g in laid]


@case
def backward_with_a_gradient(at: Laid) -> Any:
    found = []
    for entries in ((S(0), B), (S(1), P), (P, S(0)), (B, B), None):
        x, w, _ = net(at)
        g = randn(5, 3, seed=4)
        (x @ w).backward(gradient=g if entries is None else at(g, *entries))
        found += [x.grad, w.grad]
    return found


@case
def backward_into_some_inputs(at: Laid) -> Any:
    x, w, b = net(at)
    (x @ w + b).square().sum().backward(inputs=[w])
    return x.grad, w.grad, b.grad


@case
def backward_of_several_roots(at: Laid) -> Any:
    x, w, b = net(at)
    torch.autograd.backward([(x @ w).sum(), (w * w).sum(0)], [None, randn(3, seed=5)])
    return x.grad, w.grad


@case
def gradients_add_up_over_backwards(at: Laid) -> Any:
    x, w, b = net(at)
    for step in range(3):
        ((x * (step + 1)) @ w + b).square().sum().backward()
    return x.grad, w.grad, b.grad


@case
def retained_graph(at: Laid) -> Any:
    x, w, b = net(at)
    loss = (x @ w + b).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, w.grad, b.grad


@case
def leaf_used_often(at: Laid) -> Any:
    found = []
    for entries in ((S(0), B), (B, B), (P, B), (B, S(1)), (P, S(0))):
        x = at.leaf(randn(4, 4), *entries)
        ((x @ x) * x + x.T + x[0]).square().sum().backward()
        found.append(x.grad)
    return found


@case
def double_backward(at: Laid) -> Any:
    found = []
    for entries in ((S(0), B), (B, S(0)), (P, B), (S(1), S(0))):
        x, w = at.leaf(randn(4, 3), *entries), at.leaf(randn(3, 3, seed=1), B, S(0))
        (g,) = torch.autograd.grad((torch.tanh(x @ w) ** 2).sum(), x, create_graph=True)
        g.square().sum().backward()
        found += [g, x.grad, w.grad]
    return found


@case
def backward_that_creates_a_graph(at: Laid) -> Any:
    x, w, _ = net(at)
    ((x @ w) ** 3).sum().backward(create_graph=True)
    g = w.grad
    w.grad = None
    (g * g).sum().backward()
    return w.grad


@case
def gradient_penalty(at: Laid) -> Any:
    x, w, b = net(at)
    out = torch.sigmoid(x @ w + b)
    (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    ((g.norm(dim=1) - 1) ** 2).mean().backward()
    return w.grad, b.grad


@case
def detach_and_no_grad(at: Laid) -> Any:
    x, w, b = net(at)
    with torch.no_grad():
        frozen = x @ w
    with torch.inference_mode():
        seen = (x @ w).sum()
    ((x @ w).detach() * b + frozen * b).sum().backward()
    return frozen.requires_grad, x.grad, b.grad, seen


@case
def in_place_on_a_non_leaf(at: Laid) -> Any:
    x, w, b = net(at)
    y = x @ w
    y += b
    y[1:] = y.mul_(2)[1:] * 3
    y[0] = 0
    y.sum().backward()
    return y, x.grad, w.grad, b.grad


@case
def in_place_on_leaves_without_grad(at: Laid) -> Any:
    x, w, b = net(at)
    with torch.no_grad():
        for t in (x, w, b):
            t.add_(1).mul_(2)
        w.copy_(w.T.T * 2)
        x[1] = 5
        b.zero_()
    return x, w, b


@case
def boxing_in_the_middle(at: Laid) -> Any:
    x, w, b = net(at)
    y = x @ w
    for entries in ((B, B), (S(1), B), (P, B), (B, P), (S(0), S(0)), (P, P), (S(0), S(1))):
        if at.placement is not None:
            y = y.to_global(sbp=entries[: at.placement.ndim])
        y = torch.sin(y) + b
    y.sum().backward()
    return y, x.grad, w.grad, b.grad


@case
def grad_sbp_changes_no_value(at: Laid) -> Any:
    x, w, b = net(at)
    y = x @ w
    if at.placement is not None:
        n = at.placement.ndim
        for g in (B, S(0), P):
            y = y.to_global(sbp=(B,) * n, grad_sbp=(g,) * n)
    (y * b).sum().backward()
    return x.grad, w.grad, b.grad


@case
def tensor_hooks_see_and_change_gradients(at: Laid) -> Any:
    x, w, b = net(at)
    y = x @ w
    seen: list[Any] = []
    y.register_hook(lambda g: seen.append(g.clone()))
    y.register_hook(lambda g: g * 2 + 1)
    w.register_hook(lambda g: seen.append(g.clone()))
    w.register_hook(lambda g: g.sin())
    b.register_hook(lambda g: torch.ones_like(g))
    (y + b).square().sum().backward()
    return seen, x.grad, w.grad, b.grad


@case
def a_removed_hook_is_gone(at: Laid) -> Any:
    x, w, _ = net(at)
    handle = w.register_hook(lambda g: g * 100)
    handle.remove()
    (x @ w).sum().backward()
    return w.grad


@case
def post_accumulate_hooks(at: Laid) -> Any:
    x, w, b = net(at)
    seen: list[Any] = []
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (x @ w + b).square().sum().backward()
    return sorted((s.sum() for s in seen), key=float), x.grad, w.grad


@case
def retained_gradients_of_non_leaves(at: Laid) -> Any:
    x, w, b = net(at)
    y = x @ w
    y.retain_grad()
    (y + b).square().sum().backward()
    return y.grad, y.retains_grad


@case
def multi_grad_hook(at: Laid) -> Any:
    x, w, b = net(at)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook(
        [x, w], lambda gs: seen.extend(g.clone() for g in gs)
    )
    (x @ w + b).square().sum().backward()
    return seen


@case
def saved_tensors_hooks(at: Laid) -> Any:
    x, w, b = net(at)
    with torch.autograd.graph.save_on_cpu():
        y = torch.tanh(x @ w + b)
    y.sum().backward()
    return x.grad, w.grad, b.grad


@case
def half_precision_and_casts(at: Laid) -> Any:
    x, w = at.leaf(randn(4, 3).float(), S(0)), at.leaf(randn(3, 2, seed=1).float())
    (x.double() @ w.double()).float().square().sum().backward()
    return x.grad, w.grad


@case
def set_gradients_by_hand(at: Laid) -> Any:
    x, w, _ = net(at)
    (x @ w).sum().backward()
    w.grad = w.grad * 2
    x.grad = torch.ones(5, 4, dtype=torch.float64)
    (x @ w).sum().backward()
    before = w.grad.clone(), x.grad.clone()
    w.grad.zero_()
    x.grad = None
    (x @ w).sum().backward()
    return before, w.grad, x.grad


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any]) -> None:
    for world in in_turn(CASES.index(function)):
        pool(world).run(compare, function, GRIDS[world], timeout=30)
