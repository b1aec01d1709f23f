"""A user's ``autograd.Function`` that meets global tensors by a closure: its arguments and
gradients are whole and plain, and all else is an ordinary program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from consistent import B, P
from tests.consistent.torch_patches.functions_of_users import LAYOUTS, make, vector
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


@case
def adds_a_bias(at: Laid, layout: Any) -> Any:
    bias = at(randn(4, seed=1), *vector(layout))
    made = make(lambda ctx, x: x + bias, lambda ctx, g: g)
    x, plain = at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()
    ys = [made.apply(x), made.apply(plain)]
    for y in ys:
        (y**2).sum().backward()
    return ys, x.grad, plain.grad


@case
def gradient_comes_from_a_closure(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)
    made = make(lambda ctx, x: x.clone(), lambda ctx, g: (g * w).clamp(-1, 1))
    x, plain = at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()
    for leaf in (x, plain):
        made.apply(leaf).square().sum().backward()
    return x.grad, plain.grad


@case
def scaled_and_reversed_gradients(at: Laid, layout: Any) -> Any:
    scale = at(torch.tensor(0.5).double())
    reverse = make(lambda ctx, x: x.view_as(x), lambda ctx, g: -scale * g)
    x = at.leaf(randn(5, 4), *layout)
    reverse.apply(x).square().sum().backward()
    return x.grad


@case
def saved_results_of_closures(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        y, factor = torch.exp(x * w), w.sin() * 2
        ctx.save_for_backward(x, y, factor, w, None)
        ctx.kept, ctx.number = w.cos(), w.sum().item()
        return y

    def backward(ctx: Any, g: Any) -> Any:
        x, y, factor, w, nothing = ctx.saved_tensors
        assert nothing is None and x.shape == y.shape == factor.shape
        return (g * y * w + x * factor).clamp(-2, 2) * ctx.kept + ctx.number

    found = []
    for leaf in (at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()):
        y = make(forward, backward).apply(leaf)
        y.square().sum().backward()
        found += [y, leaf.grad]
    return found


@case
def saved_under_hooks_and_in_checkpoints(at: Laid, layout: Any) -> Any:
    w = at.leaf(randn(5, 4, seed=1), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        y = torch.exp(x * w.detach())
        ctx.save_for_backward(y, w)
        return y

    def backward(ctx: Any, g: Any) -> Any:
        y, w = ctx.saved_tensors
        return (g * y * w).tanh()

    made, found = make(forward, backward), []
    for leaf in (at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            y = made.apply(leaf)
        z = checkpoint(lambda x: made.apply(x * 2) * w, leaf, use_reentrant=False)
        t = checkpoint(lambda x: made.apply(x * 3) * w, leaf, use_reentrant=True)
        (y.sum() + z.sum() + t.sum()).backward()
        found += [y, z, t, leaf.grad, w.grad]
    return found


@case
def several_results_of_both_kinds(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)

    def forward(ctx: Any, x: Any, power: int, options: dict, *rest: Any) -> Any:
        ctx.rest = len(rest)
        largest = (x * w).argmax(0)
        ctx.mark_non_differentiable(largest)
        return x * w, largest, x.sum() + options["add"], "text", x * power

    def backward(ctx: Any, g: Any, _: Any, g_sum: Any, __: Any, g_power: Any) -> Any:
        return (g * w).sign() + g_sum * g_power, None, None, *(None,) * ctx.rest

    found: list[Any] = []
    for leaf in (at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()):
        y, largest, total, text, p = make(forward, backward).apply(leaf, 3, {"add": w.sum()}, "a")
        (y.sin().sum() * total + p.square().sum()).backward()
        found += [y, largest, total, text, p, largest.requires_grad, leaf.grad]
    return found


@case
def unused_results_and_gradients_that_are_none(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)

    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * w, x * 3

    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return (1.0 if a is None else (a * w).sign()) + (1.0 if b is None else b.sign() + w), None

    found: list[Any] = []
    for i in (0, 1):
        x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4), *layout)
        make(forward, backward).apply(x, y)[i].sin().sum().backward()
        found += [x.grad, y.grad]
    return found


@case
def materialized_gradients(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)
    made = make(
        lambda ctx, x: (x * w, w.exp() * x.sum()), lambda ctx, a, b: (a * w).sign() + b.cos()
    )
    x = at.leaf(randn(5, 4), *layout)
    made.apply(x)[0].sin().sum().backward()
    return x.grad


@case
def differentiated_twice(at: Laid, layout: Any) -> Any:
    w = at.leaf(randn(5, 4, seed=1), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return (x * w).sin()

    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x * w).cos() * w

    found: list[Any] = []
    for leaf in (at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()):
        y = make(forward, backward).apply(leaf).square().sum()
        (g,) = torch.autograd.grad(y, leaf, create_graph=True)
        g.square().sum().backward()
        found += [g, leaf.grad, w.grad]
    return found


@case
def functions_within_functions(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)
    inner = make(lambda ctx, x: x * w, lambda ctx, g: (g * w).clamp(-1, 1))

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return inner.apply(x) + inner.apply(x * w)

    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = inner.apply(x) + inner.apply(x * w)
        return torch.autograd.grad(y, x, g)[0]

    found: list[Any] = []
    for leaf in (at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()):
        make(forward, backward).apply(leaf).square().sum().backward()
        found.append(leaf.grad)
    return found


@case
def context_set_up_apart(at: Laid, layout: Any) -> Any:
    w = at(randn(5, 4, seed=1), *layout)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.scale = inputs
        ctx.save_for_backward(x, output)

    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return (g * w * ctx.scale + x * y).clamp(-1, 1), None

    made = make(lambda x, scale=2.0: x * w * scale, backward, setup_context=setup)
    found: list[Any] = []
    for leaf in (at.leaf(randn(5, 4), *layout), randn(5, 4).requires_grad_()):
        y = made.apply(leaf)
        y.square().sum().backward()
        found += [y, leaf.grad]
    return found


@case
def writes_into_arguments_and_closures(at: Laid, layout: Any) -> Any:
    w, seen = at(randn(5, 4, seed=1), *layout), at(torch.zeros(5, 4).double(), *layout)

    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        seen.mul_(0.5).add_(x)
        return x.mul_(w)

    def backward(ctx: Any, g: Any) -> Any:
        return (g * w).clamp(-1, 1)

    x = at.leaf(randn(5, 4), *layout)
    z = x * 3
    y = make(forward, backward).apply(z)
    (y * y).sum().backward()
    return y is z, z, seen, x.grad


@case
def lists_of_tensors_and_gradients_of_what_is_reached(at: Laid, layout: Any) -> Any:
    w = at.leaf(randn(5, 4, seed=1), *layout)

    def forward(ctx: Any, run: Any, xs: Any, *leaves: Any) -> Any:
        ctx.run, ctx.count = run, len(leaves)
        ctx.save_for_backward(*leaves)
        return run(xs, *leaves)

    def backward(ctx: Any, g: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.run(None, *leaves)
        found = torch.autograd.grad(y, [*leaves, w], g)
        return None, None, *found[: ctx.count]

    x, y = at.leaf(randn(5, 4), *layout), at.leaf(randn(5, 4, seed=2), *layout)
    extra = [at(randn(5, 4, seed=3), *layout)]

    def run(xs: Any, a: Any, b: Any) -> Any:
        return a.sin() * b * w + (0 if xs is None else xs[0].sum() * 0)

    make(forward, backward).apply(run, extra, x, y).square().sum().backward()
    return x.grad, y.grad


@case
def complex_and_half(at: Laid, layout: Any) -> Any:
    if P in layout:
        layout = (B, B)
    w = at(torch.complex(randn(5, 4, seed=1), randn(5, 4, seed=2)), *layout)
    made = make(lambda ctx, x: x * w, lambda ctx, g: g * w.conj())
    x = at.leaf(torch.complex(randn(5, 4), randn(5, 4, seed=3)), *layout)
    made.apply(x).abs().square().sum().backward()
    low = at((randn(5, 4, seed=1) * 4).round().to(torch.bfloat16), *layout)
    halved = make(lambda ctx, x: x.bfloat16() * low, lambda ctx, g: (g * low).double())
    z = at.leaf((randn(5, 4) * 4).round(), *layout)
    halved.apply(z).float().sum().backward()
    return x.grad, z.grad


@case
def without_gradients(at: Laid, layout: Any) -> Any:
    w, found = at(randn(5, 4, seed=1), *layout), []
    made = make(lambda ctx, x: (x * w).exp(), lambda ctx, g: g)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found += [made.apply(at(randn(5, 4), *layout)), made.apply(randn(5, 4))]
    return found
