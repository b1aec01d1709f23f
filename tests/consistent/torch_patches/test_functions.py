"""Module hooks and checkpoints: functions of torch that work on global tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from consistent import B, P, S
from tests.ranks import SIZES, pool
from tests.twins import GRIDS, Laid, compare, randn

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any], world: int) -> None:
    pool(world).run(compare, function, GRIDS[world], timeout=30)


def _mlp(at: Laid, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, 3, bias)]
    return at.module(nn.Sequential(*layers).double(), {"0.weight": S(0), "2.weight": S(1)})  # type: ignore[return-value]


def _grads(module: nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters()]


@case
def full_backward_hooks_see_logical_gradients(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    seen: list[Any] = []
    for m in net:
        m.register_full_backward_hook(lambda m, gi, go: seen.extend(g.clone() for g in (*gi, *go)))
    net(x).square().sum().backward()
    return seen, x.grad, _grads(net)


@case
def full_backward_hooks_change_gradients(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    net[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2 + 1,))
    net[2].register_full_backward_hook(lambda m, gi, go: (torch.ones_like(gi[0]),))
    net[2].register_full_backward_pre_hook(lambda m, go: (go[0].sin(),))
    net(x).square().sum().backward()
    return x.grad, _grads(net)


@case
def full_backward_hook_without_input_gradient(at: Laid) -> Any:
    net, x = _mlp(at), at(randn(5, 4), S(0))
    seen: list[Any] = []
    net[0].register_full_backward_hook(
        lambda m, gi, go: seen.append((gi[0] is None, go[0].clone()))
    )
    with pytest.warns(UserWarning, match="Full backward hook"):
        net(x).square().sum().backward()
    return seen, _grads(net)


@case
def forward_hooks(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    net[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    net[2].register_forward_hook(lambda m, a, out: out + 1)
    y = net(x)
    y.sum().backward()
    return y, x.grad, _grads(net)


@case
def checkpoints_of_both_kinds(at: Laid) -> Any:
    found = []
    for reentrant in (False, True):
        for entry in (S(0), B, P):
            net, x = _mlp(at), at.leaf(randn(5, 4), entry)
            y = checkpoint(net, x, use_reentrant=reentrant)
            (y * y).sum().backward()
            found += [y, x.grad, _grads(net)]
    return found


@case
def checkpoint_with_a_closure_and_nested(at: Laid) -> Any:
    net, x, w = _mlp(at), at.leaf(randn(5, 4), S(0)), at.leaf(randn(3, 3, seed=1), B, S(0))

    def inner(z: Any) -> Any:
        return torch.sin(z @ w)

    def outer(z: Any) -> Any:
        return checkpoint(inner, net(z), use_reentrant=False) + z.sum()

    y = checkpoint(outer, x, use_reentrant=False)
    y.square().sum().backward()
    return y, x.grad, w.grad, _grads(net)


@case
def checkpoint_of_a_sequence(at: Laid) -> Any:
    net, x = _mlp(at), at.leaf(randn(5, 4), S(0))
    y = checkpoint_sequential(net, 2, x, use_reentrant=False)
    y.sum().backward()
    return y, x.grad, _grads(net)


@case
def amp_autocast(at: Laid) -> Any:
    x, w = at.leaf(randn(4, 8).float(), S(0)), at.leaf(randn(8, 2, seed=1).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
    y.float().sum().backward()
    return y.dtype, x.grad.dtype, y.float(), x.grad


@case
def dropout_repeats_in_a_checkpoint(at: Laid) -> Any:
    x = at.leaf(torch.ones(64, 4, dtype=torch.float64), S(0))
    ok = []
    for reentrant in (False, True):
        x.grad = None
        y = checkpoint(lambda z: nn.functional.dropout(z, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        ok.append(bool((x.grad == y).all()) and 0 < int((y == 0).sum()) < 256)
    return ok


@case
def reentrant_checkpoint_of_a_closure(at: Laid) -> Any:
    """No argument of the checkpoint is global."""
    found = []
    for entry in (S(0), S(1), B, P):
        w, x = at.leaf(randn(5, 4, seed=1), entry), randn(5, 4).requires_grad_()
        b = at.leaf(randn(4, seed=2))

        def body(z: Any, w: Any = w, b: Any = b) -> Any:
            return torch.sin(z * w) + b, (w * b).sum() * z.sum()

        y, total = checkpoint(body, x, use_reentrant=True)
        (y.square().sum() * total).backward()
        found += [y, total, x.grad, w.grad, b.grad]
    return found


@case
def reentrant_checkpoints_nested_and_with_plain_and_global_arguments(at: Laid) -> Any:
    found = []
    for entry in (S(0), B, P):
        net, x, z = _mlp(at), at.leaf(randn(5, 4), entry), randn(3, seed=4).requires_grad_()

        def inner(h: Any, z: Any, net: Any = net) -> Any:
            return net(h) * z, h

        def outer(x: Any, z: Any, flag: bool) -> Any:
            h, same = checkpoint(inner, x * 2, z, use_reentrant=True)
            assert flag and same.shape == x.shape
            return h.sin() + same.sum(), z

        y, again = checkpoint(outer, x, z, True, use_reentrant=True)
        (y.square().sum() + again.sum()).backward()
        found += [y, again, x.grad, z.grad, _grads(net)]
    return found


@case
def reentrant_checkpoint_without_gradients(at: Laid) -> Any:
    net, x = _mlp(at), at(randn(5, 4), S(0))
    with torch.no_grad():
        return checkpoint(net, x, use_reentrant=True)
