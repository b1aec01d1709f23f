"""Programs that run for real and in a simulation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import consistent
from consistent import B, S
from consistent.auto.machines.work import kind_of
from consistent.auto.simulation.callers import Callers
from consistent.auto.simulation.real_memory import Holding
from consistent.dispatch.plans.shards import plain
from consistent.spec.nested import tensors_in
from mirrored.comm import Link
from mirrored.transports.counting import Call, counting
from mirrored.transports.default import current

WIDTH, ROWS = 64, 48
LEAST = 64  # smaller tensors, and whole numbers, may be values that a simulation computes


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(-2)), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Tokens to the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def begin(ranks: int, plan: Any, shape: tuple[int, ...]) -> Any:
    """A step of the model, as a function of nothing."""
    torch.manual_seed(0)
    placement = consistent.placement(
        "cpu",
        torch.arange(ranks).view(shape).tolist(),
        axes=("dp", "tp")[: len(shape)] if isinstance(plan, dict) else None,
    )
    model = consistent.parallelize(Model(), placement, plan, verbose=False)
    splits = plan != "tensor"
    layout = [S(0) if splits and axis == 0 else B for axis in range(len(shape))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 100, (ROWS, 40))

    def step() -> None:
        x = consistent.distribute(tokens, placement, layout)
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()

    return step


def begin_stages(schedule: str) -> Any:
    """The same in two stages on a rank each."""
    torch.manual_seed(0)
    model = Model()
    pipe = consistent.nn.pipeline(
        model,
        [consistent.placement("cpu", [0]), consistent.placement("cpu", [1])],
        split=["blocks.1"],
        loss=loss_of,
        micro_batches=4,
        schedule=schedule,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 100, (ROWS, 40))

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(tokens, tokens)
        optimizer.step()

    return step


class _Calling(TorchDispatchMode):
    """Counts ops on floating-point tensors of more than ``LEAST`` elements, by who calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.callers, self.found = Callers(), Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            given = [plain(x) for x in tensors_in((args, out)) if x.is_floating_point()]
            if kind_of(func) != "view" and any(x.numel() > LEAST for x in given):
                self.found[self.callers.now(), str(func)] += 1
        return out


def called(rank: int, make: Any, *args: Any) -> Counter[tuple[str, str]]:
    """How often each (caller, op) occurs in the third step."""
    step = make(*args)
    step()
    step()
    with _Calling() as mode, mode.callers.observing():
        step()
    return mode.found


def measured(rank: int, make: Any, *args: Any) -> tuple[list[Call], int, Link | None]:
    """(what this rank sends, the most memory that it holds) in the third step, and what messages
    cost here."""
    with Holding() as held:
        step = make(*args)
        step()
        step()
        held.forget()
        with counting() as log:
            step()
    return log.calls, held.peak, current().link("cpu")
