"""Functions of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.consistent.torch_patches.functions_of_users import make
from tests.twins import randn

from .steps import Steps


def function(steps: Steps) -> None:
    rng, x = steps.rng, steps.any()
    kind = rng.choice(list(_FUNCTIONS))
    w = steps.new() if rng.random() < 0.7 else rng.choice(steps.leaves)
    if rng.random() < 0.15:
        w = randn(*steps.shape, seed=9)
    apply = _FUNCTIONS[kind](steps, w)
    apply = apply.apply if isinstance(apply, type) else apply
    way = rng.randrange(5)
    if way == 0:
        y = checkpoint(lambda x: apply(x * 2), x, use_reentrant=False)
    elif way == 1:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with hooks:
            y = apply(x)
    elif way == 2 and rng.random() < 0.5:
        with torch.no_grad():
            y = apply(x)
    elif way == 3:
        with torch.no_grad(), torch.enable_grad():
            y = apply(x.flip(0))
    else:
        y = apply(x)
    y = y[0] if isinstance(y, tuple) else y
    steps.live.append(y.tanh())


def _bias(steps: Steps, w: Any) -> Any:
    return make(lambda ctx, x: x + w, lambda ctx, g: g.clamp(-1, 1))


def _straight(steps: Steps, w: Any) -> Any:
    return make(lambda ctx, x: (x * w).round(), lambda ctx, g: g * w)


def _saving(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        y, kept = (x * w).exp().clamp(max=3), w.cos()
        ctx.save_for_backward(x, y, kept, w)
        ctx.number = w.sum().item()
        return y

    def backward(ctx: Any, g: Any) -> Any:
        x, y, kept, w = ctx.saved_tensors
        return (g * y + kept * x).tanh() * ctx.number + w

    return make(forward, backward)


def _by_hand(steps: Steps, w: Any) -> Any:
    def body(x: Any) -> Any:
        return (x * w).sin() + w.mean(0)

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return body(x)

    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = body(x)
        if w.requires_grad and w.is_leaf:
            y.backward(g)
            return x.grad
        return torch.autograd.grad(y, x, g)[0]

    return make(forward, backward)


def _several(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        order = (x * w).argmax(0)
        ctx.mark_non_differentiable(order)
        return x * w, order, x.sum() + w.sum()

    return make(forward, lambda ctx, g, _, total: (g * w).sign() + total)


def _memory(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.numpy() * x.detach().numpy()) + w

    return make(forward, backward)


def _keeping(steps: Steps, w: Any) -> Any:
    seen = steps.new(steps.shape[1])

    def forward(ctx: Any, x: Any) -> Any:
        seen.mul_(0.5).add_(x.mean(0))
        return x - seen

    steps.found.append(seen)
    return make(forward, lambda ctx, g: g * seen.sign())


def _inner(steps: Steps, w: Any) -> Any:
    inner = _bias(steps, w)

    def forward(ctx: Any, x: Any) -> Any:
        return inner.apply(x) * w

    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            z = g.detach().requires_grad_()
            y = inner.apply(z) * w
        return torch.autograd.grad(y.sum(), z)[0]

    return make(forward, backward)


def _unused(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * w, x * 3

    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return (1.0 if a is None else (a * w).sign()) + (1.0 if b is None else b.sign() + w)

    return make(forward, backward)


def _once(steps: Steps, w: Any) -> Any:
    """Arguments that are not tensors; a backward that is not differentiated."""

    def forward(ctx: Any, scale: float, x: Any, names: Any, more: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.scale, ctx.names = scale, names
        return (x * w + more["add"]) * scale

    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return None, g * w * ctx.scale + x.sign() * len(ctx.names), None, None

    made = make(forward, backward)
    return lambda x: made.apply(1.5, x, ["a", None], {"add": 0.25})


def _in_place(steps: Steps, w: Any) -> Any:
    """It writes into its argument, and says so."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2).add_(w)

    made = make(forward, lambda ctx, g: g * 2)
    return lambda x: made.apply(x * 1)


def _two(steps: Steps, w: Any) -> Any:
    """Two tensors go in, in layouts of their own, and two come out, both of which are used."""

    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, (x + y).sum(0)

    def backward(ctx: Any, a: Any, b: Any) -> Any:
        x, y = ctx.saved_tensors
        return a * y + b, (a * x + b).clamp(-2, 2)

    made, other = make(forward, backward), steps.any()

    def call(x: Any) -> Any:
        a, b = made.apply(x + w, other)
        return a + b * w

    return call


def _twice(steps: Steps, w: Any) -> Any:
    """A gradient of a gradient goes through its backward."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sin() * w

    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g * x.cos() * w

    made = make(forward, backward)

    def call(x: Any) -> Any:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return made.apply(x)
        y = made.apply(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + first

    return call


class _Normed(nn.Module):
    """Parameters, and a buffer that it keeps up to date."""

    def __init__(self, weight: Any, mean: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.register_buffer("mean", mean)

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))  # type: ignore[operator]
        return (x - self.mean) * self.weight


def _module(steps: Steps, w: Any) -> Any:
    net = _Normed(w, steps.new(steps.shape[1]))
    net.train(steps.rng.random() < 0.7)
    steps.found.append(net.weight)

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return net(x)

    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = net.eval()(x)
        y.backward(g)
        return x.grad

    made = make(forward, backward)

    def call(x: Any) -> Any:
        y = made.apply(x)
        steps.found.append(net.mean.clone())  # type: ignore[operator]
        return y

    return call


def _drawing(steps: Steps, w: Any) -> Any:
    """It draws whole plain numbers that all ranks share; what they are is its own affair."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.keep = torch.rand_like(x) >= 0
        return x * ctx.keep * w

    return make(forward, lambda ctx, g: g * ctx.keep * w)


def _set_up(steps: Steps, w: Any) -> Any:
    """With setup_context, keywords left out, and a transposed result."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    made = make(lambda x: (x * w).t(), lambda ctx, g: g.t() * w, setup_context=setup)
    return lambda x: made.apply(x).t()


_FUNCTIONS = {
    "bias": _bias, "straight": _straight, "saving": _saving, "by hand": _by_hand,
    "several": _several, "memory": _memory, "keeping": _keeping, "inner": _inner, "unused": _unused,
    "once": _once, "in place": _in_place, "two": _two, "twice": _twice, "module": _module,
    "drawing": _drawing, "set up": _set_up,
}  # fmt: skip
