"""Writes through views in every grad mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .steps import Steps

# Entered one in the other.
_MODES: tuple[tuple[Callable[[], Any], ...], ...] = (
    (), (), (torch.no_grad,), (torch.inference_mode,), (torch.no_grad, torch.enable_grad),
    (torch.inference_mode, torch.enable_grad), (torch.no_grad, torch.inference_mode),
)  # fmt: skip


def write(steps: Steps) -> None:
    rng = steps.rng
    modes, inside, held = rng.choice(_MODES), rng.random() < 0.4, rng.random() < 0.5
    base = _base(steps, modes)
    views = _views(rng, *steps.shape)
    early = [rng.choice(views)(base)] if held else []  # taken before what is written
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        if inside and modes:
            base = base * 1
        view = rng.choice(early) if early and not inside else rng.choice(views)(base)
        if rng.random() < 0.3 and view.ndim:
            view = view[:1]
        for _ in range(rng.choice([1, 1, 2])):
            rng.choice(_WRITES)(view)
        steps.found.append(rng.choice(views)(base).detach().clone())
    steps.found += [x.detach().clone() for x in (view, *early)]
    if base.is_inference():
        steps.found.append(base.clone())
    elif base.shape == steps.shape and not any(base is x for x in steps.leaves):
        steps.live.append(base.tanh())


def _base(steps: Steps, modes: tuple) -> Any:
    """What is written into: a leaf (as initialisers do), something computed, or plain data."""
    rng = steps.rng
    if modes in ((torch.no_grad,), (torch.inference_mode,)) and rng.random() < 0.3:
        return rng.choice(steps.leaves)
    base = steps.any()
    return base * 1 if not modes or rng.random() < 0.5 else base.detach().clone()


def _views(rng: random.Random, rows: int, columns: int) -> list[Callable[[Any], Any]]:
    i, j = rng.randrange(rows), rng.randrange(columns)
    return [
        lambda x: x[i], lambda x: x[i:], lambda x: x[:, j], lambda x: x[:, j:], lambda x: x.t(),
        lambda x: x.view(-1)[j:], lambda x: x.chunk(2, 1)[0], lambda x: x.narrow(0, i, 1),
        lambda x: x.select(1, j), lambda x: x.diagonal(), lambda x: x.unsqueeze(0)[..., :1],
        lambda x: x.unbind(1)[j], lambda x: x.t()[j:], lambda x: x.view(columns, rows)[j],
        lambda x: x[i, j:], lambda x: x[::2], lambda x: x.t().unsqueeze(1)[j:].transpose(0, 2),
        lambda x: x.view(rows, 1, columns)[:, 0, :j], lambda x: x.movedim(0, 1)[j],
        lambda x: x.split([i, rows - i])[1], lambda x: x.tensor_split(2)[0],
        lambda x: x.swapaxes(0, 1)[..., i:], lambda x: x.view_as(x)[i], lambda x: x[..., -1],
        lambda x: x.view(-1), lambda x: x.unflatten(1, (1, columns))[:, :, j], lambda x: x,
    ]  # fmt: skip


def _add_to_item(v: Any) -> None:
    v[..., :1] += 1


def _out(v: Any) -> None:
    torch.mul(v.detach(), 0.5, out=v)


_WRITES: list[Callable[[Any], Any]] = [
    lambda v: v.zero_(), lambda v: v.add_(1), lambda v: v.mul_(2), lambda v: v.fill_(0.5),
    lambda v: v.copy_(v.detach().sin()), lambda v: v.clamp_(-0.3, 0.3), lambda v: v.neg_(),
    lambda v: v.masked_fill_(v.detach() > 0, 0.1), lambda v: v.sub_(v.detach().mean()),
    lambda v: nn.init.constant_(v, 0.2), lambda v: v.__setitem__(..., 1.5),
    lambda v: v.copy_(v.detach().flip(0)) if v.ndim else v.neg_(), lambda v: v.lerp_(v.detach(), 2),
    lambda v: v.__setitem__(v.detach() > 0.1, 0.3), lambda v: v.t_() if v.ndim == 9 else v.sin_(),
    lambda v: v.addcmul_(v.detach(), v.detach(), value=0.1), lambda v: v.data.mul_(0.5),
    lambda v: torch._foreach_mul_([v], 0.5), lambda v: nn.init.zeros_(v), _out,
    lambda v: _add_to_item(v) if v.ndim else v.add_(1),
]  # fmt: skip
