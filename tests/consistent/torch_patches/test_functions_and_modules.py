"""A user's ``autograd.Function`` over a module, its parameters and buffers, or a code book."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from consistent import B, P
from consistent.spec import Split
from tests.consistent.torch_patches.functions_of_users import LAYOUTS, make
from tests.ranks import SIZES, pool
from tests.twins import GRIDS, Laid, compare, distinct, randn

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any], world: int) -> None:
    pool(world).run(_all_layouts, function, GRIDS[world], timeout=60)


def _all_layouts(rank: int, function: Callable[..., Any], grid: Any) -> None:
    for layout in distinct(LAYOUTS, grid):
        compare(rank, function, grid, layout)


def mlp(at: Laid, layout: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    first = layout[0] if isinstance(layout[0], Split) else B
    return at.module(net, {"0.weight": first, "0.bias": B, "2.weight": first})


def grads(module: nn.Module) -> list[Any]:
    return [p.grad for p in module.parameters()]


@case
def straight_through_a_module(at: Laid, layout: Any) -> Any:
    net = mlp(at, layout)
    made = make(lambda ctx, x: net(x).round(), lambda ctx, g: g)
    x = at.leaf(randn(5, 4), *layout)
    y = made.apply(x * 3)
    (y * y + y).sum().backward()
    return y, x.grad


@case
def quantiser_with_a_code_book(at: Laid, layout: Any) -> Any:
    book = at(randn(7, 4, seed=1), *layout)
    counts, means = at(torch.ones(7).double()), at(randn(7, 4, seed=1), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        nearest = torch.cdist(x, book).argmin(1)
        hot = nn.functional.one_hot(nearest, 7).double()
        counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        means.mul_(0.9).add_(hot.T @ x, alpha=0.1)
        book.copy_(means / counts[:, None])
        ctx.mark_non_differentiable(nearest)
        return book[nearest], nearest

    x = at.leaf(randn(5, 4), *layout)
    made, found = make(forward, lambda ctx, g, _: g), []
    for _ in range(2):
        y, nearest = made.apply(x.tanh())
        (y * x).sum().backward()
        found += [y, nearest]
    return found, book, counts, means, x.grad


def _checkpointed(net: Any, *, params_given: bool) -> Any:
    """By hand, as before torch had one: with gradients of parameters put into them, or returned."""

    def forward(ctx: Any, x: Any, *params: Any) -> Any:
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return net(x)

    def backward(ctx: Any, g: Any) -> Any:
        x, *params = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = net(x)
        if not params_given:
            torch.autograd.backward(y, g)
            return (x.grad,)
        return torch.autograd.grad(y, (x, *params), g, allow_unused=True)

    return make(forward, backward)


@case
def checkpoint_by_hand(at: Laid, layout: Any) -> Any:
    found: list[Any] = []
    for params_given in (False, True):
        net, x = mlp(at, layout), at.leaf(randn(5, 4), *layout)
        made = _checkpointed(net, params_given=params_given)
        params = list(net.parameters()) if params_given else ()
        y = made.apply(x * 2, *params)
        y = net(made.apply(y, *params)) + x
        y.square().sum().backward()
        found += [y, x.grad, grads(net)]
    return found


@case
def adjoint_of_an_equation(at: Laid, layout: Any) -> Any:
    net, x = mlp(at, layout), at.leaf(randn(5, 4), *layout)
    names, step, count = list(net.parameters()), 0.1, 3

    def forward(ctx: Any, y: Any, *params: Any) -> Any:
        with torch.no_grad():
            for _ in range(count):
                y = y + step * net(y)
        ctx.save_for_backward(y, *params)
        return y

    def backward(ctx: Any, g: Any) -> Any:
        y, *params = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in params]
        for _ in range(count):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                f = net(y)
            gy, *gs = torch.autograd.grad(f, (y, *params), g, allow_unused=True)
            sums = [s + step * (torch.zeros_like(s) if v is None else v) for s, v in zip(sums, gs)]
            y, g = (y - step * f).detach(), g + step * gy
        return g, *sums

    y = make(forward, backward).apply(x, *names)
    y.square().sum().backward()
    return y, x.grad, grads(net)


@case
def fixed_point_of_a_module(at: Laid, layout: Any) -> Any:
    net, x = mlp(at, layout), at.leaf(randn(5, 4), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                new = 0.2 * net(z) + x
                if (new - z).norm() < 1e-9:
                    break
                z = new
        ctx.save_for_backward(z, x)
        return z

    def backward(ctx: Any, g: Any) -> Any:
        z, x = ctx.saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            f = 0.2 * net(z)
        v = g
        for _ in range(20):
            v = g + torch.autograd.grad(f, z, v, retain_graph=True)[0]
        f.backward(v)
        return v

    y = make(forward, backward).apply(x * 2)
    y.square().sum().backward()
    return y, x.grad, grads(net)


@case
def reversible_blocks(at: Laid, layout: Any) -> Any:
    f, g = mlp(at, layout), mlp(at, layout)
    x = at.leaf(randn(5, 8), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        y = torch.cat([a, b], 1)
        ctx.y = y.detach()
        return y

    def backward(ctx: Any, dy: Any) -> Any:
        (a, b), (da, db) = ctx.y.chunk(2, 1), dy.chunk(2, 1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            ga = g(a)
        ga.backward(db)
        b, da = (b - ga).detach().requires_grad_(), da + a.grad
        with torch.enable_grad():
            fb = f(b)
        torch.autograd.backward(fb, da)
        return torch.cat([da, db + b.grad], 1)

    made = make(forward, backward)
    made.apply(made.apply(x)).square().sum().backward()
    return x.grad, grads(f), grads(g)


@case
def a_module_of_functions(at: Laid, layout: Any) -> Any:
    """The parameters are reached by ``self``, as arguments and not."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(4, 4, seed=1))
            self.bias = nn.Parameter(randn(4, seed=2))
            self.mean: Any
            self.register_buffer("mean", torch.zeros(4).double())

        def forward(self, x: Any) -> Any:
            def forward(ctx: Any, x: Any, w: Any) -> Any:
                ctx.save_for_backward(x, w)
                self.mean.mul_(0.9).add_(x.mean(0))
                return x @ w.T + self.bias + self.mean

            def backward(ctx: Any, g: Any) -> Any:
                x, w = ctx.saved_tensors
                return (g @ w).clamp(-1, 1) * self.bias, g.T @ x

            return make(forward, backward).apply(x, self.weight)

    plan = {"weight": layout[0] if layout[0] is not P else B}
    layer, x = at.module(Layer(), plan), at.leaf(randn(5, 4), *layout)
    for _ in range(2):
        layer(x.tanh()).square().sum().backward()
    return x.grad, layer.weight.grad, layer.mean
