"""Models that hold functions of the user's, whose forward and backward reach their modules,
parameters and code books."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from consistent import B, P, S
from consistent.spec import Sbp, Split
from tests.twins import randn

# Copies of an addend would differ in their last bits: none is (B, P).
LAYOUTS: tuple[tuple[Sbp, Sbp], ...] = ((S(0), P), (S(1), S(0)), (B, B), (P, S(1)))
PLANS = ("data", "zero1", "zero2", "zero3", "tensor")


def vector(layout: Any) -> tuple[Sbp, ...]:
    return tuple(S(0) if isinstance(entry, Split) else entry for entry in layout)


def make(forward: Any, backward: Any, **more: Any) -> Any:
    """A Function of two plain functions, which may close over anything."""
    methods = {"forward": forward, "backward": backward, **more}
    return type("Made", (Function,), {k: staticmethod(v) for k, v in methods.items()})


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


class Straight(_Block):
    def forward(self, x: Any) -> Any:
        made = make(lambda ctx, x: (self.net(x) * 8).round() / 8, lambda ctx, g: g)
        return made.apply(x) + self.net(x)


class ByHand(_Block):
    """A checkpoint that returns the gradients of the parameters it was given."""

    def forward(self, x: Any) -> Any:
        def forward(ctx: Any, x: Any, *params: Any) -> Any:
            ctx.save_for_backward(x, *params)
            return self.net(x)

        def backward(ctx: Any, g: Any) -> Any:
            x, *params = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = self.net(x)
            return torch.autograd.grad(y, (x, *params), g, allow_unused=True)

        return make(forward, backward).apply(x * 2, *self.net.parameters())


class Accumulating(_Block):
    """One that runs backward inside backward."""

    def forward(self, x: Any) -> Any:
        def forward(ctx: Any, x: Any) -> Any:
            ctx.x = x
            return self.net(x)

        def backward(ctx: Any, g: Any) -> Any:
            with torch.enable_grad():
                x = ctx.x.detach().requires_grad_()
                y = self.net(x)
            y.backward(g)
            return x.grad

        return make(forward, backward).apply(x * 2) + x


class Adjoint(_Block):
    def forward(self, x: Any) -> Any:
        def forward(ctx: Any, y: Any, *params: Any) -> Any:
            for _ in range(2):
                y = y + 0.1 * self.net(y)
            ctx.save_for_backward(y, *params)
            return y

        def backward(ctx: Any, g: Any) -> Any:
            y, *params = ctx.saved_tensors
            sums = [torch.zeros_like(p) for p in params]
            for _ in range(2):
                with torch.enable_grad():
                    y = y.detach().requires_grad_()
                    f = self.net(y)
                gy, *gs = torch.autograd.grad(f, (y, *params), g)
                sums = [s + 0.1 * v for s, v in zip(sums, gs, strict=True)]
                y, g = (y - 0.1 * f).detach(), g + 0.1 * gy
            return g, *sums

        return make(forward, backward).apply(x, *self.net.parameters())


class Book(_Block):
    """Quantises by a code book."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(randn(7, 4, seed=3))

    def forward(self, x: Any) -> Any:
        def forward(ctx: Any, x: Any) -> Any:
            return self.book[torch.cdist(x, self.book).argmin(1)]

        y = self.net(x)
        nearest = make(forward, lambda ctx, g: g).apply(y)
        return nearest + (y.detach() @ self.book.T).tanh() @ self.book


class Kernel(_Block):
    """By numpy, as code of others reads memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(4, 4, seed=3))

    def forward(self, x: Any) -> Any:
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return torch.from_numpy(x.detach().numpy() @ w.detach().numpy().T)

        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            return g.mm(w), torch.from_numpy(g.numpy().T @ x.detach().numpy())

        return make(forward, backward).apply(self.net(x), self.weight)


BLOCKS = (Straight, ByHand, Accumulating, Adjoint, Book, Kernel)


def model(block: type[_Block], count: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4).double(), block()) for _ in range(count)))


def loss(y: Any, target: Any) -> Any:
    return (y - target).square().mean()
