"""Outer: the optimizer that steps what islands have in common, on what they differ by.

```
island 0   start -> step, step, ... step -> its own      \\
                                                           mean of (start - its own)  ->  start
island 1   start -> step, step, ... step -> its own      /                                  |
                     parameters of both  <--------------------------------------------------+
```

Every rank has a shard of each parameter and meets the ranks that have the same shard in the other
islands, so each sends what it holds and nothing is gathered inside an island.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.transports.torch_dist.islands import Between

from ..dispatch.plans.shards import is_global, plain


class Outer:
    """See `Islands.outer`.

    Attributes:
        steps: calls of `step` so far.
        optimizer: the outer one; its learning rate may be changed. It steps copies of the
            parameters as they were when islands last met.
    """

    def __init__(
        self,
        between: Between,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        every: int,
        parts: int,
        dtype: torch.dtype | None,
    ) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_alike(between, named, (every, parts, dtype))  # what is wrong below is so on all
        _check(named, every, parts, dtype)
        self.steps, self._every, self._dtype = 0, every, dtype
        self._between, self._params = between, named
        with torch.no_grad():
            for p in named.values():
                _from_first(between, p)
            self._start = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
        self._parts = _dealt(named, parts)
        self.optimizer = optimizer(list(self._start.values()))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other islands."""
        return self._between.sent

    def step(self) -> bool:
        """Count a step of this island, after its optimizer's. After each ``every`` of them islands
        meet: the outer optimizer steps, and parameters are what it gives on all islands.

        Returns:
            Whether islands have met.
        """
        self.steps += 1
        met = False
        for k, names in enumerate(self._parts, 1):
            if self.steps % self._every == self._every * k // len(self._parts) % self._every:
                self._meet(names)
                met = True
        return met

    def finish(self) -> None:
        """Bring islands together at the end of a training: each parameter is the mean of what
        islands have. The outer optimizer does not step: what it would go beyond the mean, no later
        step would correct. A call of all islands; parameters are the same on all then."""
        for dtype in sorted({p.dtype for p in self._params.values()}, key=str):
            self._average([n for n, p in self._params.items() if p.dtype == dtype], dtype)
        with torch.no_grad():
            for name, start in self._start.items():
                assert start.grad is not None
                start.sub_(start.grad)
                self._params[name].copy_(start)
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, parameters as they were when islands last met, and the outer optimizer's
        state: the same on all islands but between the meetings of parts."""
        start = {name: x.detach() for name, x in self._start.items()}
        return {"steps": self.steps, "start": start, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.steps = state["steps"]
        with torch.no_grad():
            for name, x in state["start"].items():
                self._start[name].copy_(x)
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def _meet(self, names: list[str]) -> None:
        for dtype in sorted({self._params[n].dtype for n in names}, key=str):
            self._average([n for n in names if self._params[n].dtype == dtype], dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()  # parameters of other parts have no gradient, so they stay
        for name in names:
            self._params[name].copy_(self._start[name])

    @torch.no_grad()
    def _average(self, names: list[str], dtype: torch.dtype) -> None:
        """Give the copies of some parameters of one dtype their gradients."""
        shards = []
        for name in names:
            own, start = _shard(self._params[name]), _shard(self._start[name])
            shards.append((start - own).reshape(-1).cpu())
        mean = self._between.mean(torch.cat(shards), self._dtype or dtype)
        for name, part in zip(names, mean.split([len(x) for x in shards]), strict=True):
            start = self._start[name]
            start.grad = _laid_as(start, part.view(_shard(start).shape))


def _shard(x: Tensor) -> Tensor:
    """What this rank holds of ``x``, in its memory; nothing where it lies on other ranks."""
    shard = plain(x) if is_global(x) else x
    return shard.detach() if not shard.is_meta else torch.empty(0, dtype=x.dtype)


def _from_first(between: Between, p: Tensor) -> None:
    given = _shard(p).cpu().contiguous()
    between.from_first(given)
    p.copy_(_laid_as(p, given))


def _laid_as(x: Tensor, shard: Tensor) -> Tensor:
    """A tensor that lies as ``x`` does, and of which this rank holds ``shard``."""
    made = torch.zeros_like(x)
    _shard(made).copy_(shard)
    return made


def _dealt(named: Mapping[str, Tensor], parts: int) -> list[list[str]]:
    """Names in their order, cut where about the same number of elements are in each part."""
    total, seen = sum(p.numel() for p in named.values()), 0
    found: list[list[str]] = [[] for _ in range(parts)]
    for name, p in named.items():
        found[min(parts - 1, seen * parts // max(1, total))].append(name)
        seen += p.numel()
    return [names for names in found if names]


def _check(named: Mapping[str, Tensor], every: int, parts: int, dtype: torch.dtype | None) -> None:
    if not named:
        raise ValueError("islands.outer: the model has no parameter that requires a gradient.")
    if every < 1:
        raise ValueError(f"islands.outer: every={every}. Give 1 step or more.")
    if not 1 <= parts <= every:
        raise ValueError(
            f"islands.outer: parts={parts} with every={every}. Each part meets at a step of its "
            f"own: give 1 to {every}."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"islands.outer: dtype={dtype}. Give a floating dtype, torch.bfloat16.")


def _described(named: Mapping[str, Any]) -> Iterator[str]:
    for name, p in named.items():
        yield f"{name} {tuple(p.shape)} {p.dtype} {p._spec if is_global(p) else 'plain'}"


def _check_alike(between: Between, named: Mapping[str, Tensor], figures: tuple[Any, ...]) -> None:
    text = "\n".join([*_described(named), str(figures)])
    alike = between.alike(hashlib.sha256(text.encode()).digest())
    if not all(alike):
        others = [k for k, same in enumerate(alike) if not same]
        raise ValueError(
            f"islands.outer: island {between.number} has {len(named)} parameters and (every, parts,"
            f" dtype) = {figures}, and islands {others} have others. Build the same model under "
            "the same plan on every island, and give the same figures."
        )
