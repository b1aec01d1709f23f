"""Tensors among the settings and the state of an optimizer come back under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import consistent
from consistent import Placement, checkpoint
from tests.ranks import pool


class Custom(torch.optim.Optimizer):
    """Keeps tensors in its groups and its state, nested, and what is one for all groups."""

    def __init__(self, params: Any, rate: float) -> None:
        deep = {"a": [torch.tensor(rate), {"b": torch.tensor([rate, 2.0])}], "n": 3}
        super().__init__(params, {"rate": torch.tensor(rate), "deep": deep})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state: Any = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["more"] = {"both": [torch.zeros_like(p), torch.tensor(1.0)]}
                state["mean"].add_(p.grad)
                state["more"]["both"][0].add_(p.grad, alpha=2)
                p.sub_(group["rate"] * (state["mean"] + state["more"]["both"][0]))


MAKES: dict[str, Any] = {
    "rate": lambda ps, lr: torch.optim.AdamW(ps, lr=torch.tensor(lr)),
    "rate, one at a time": lambda ps, lr: torch.optim.Adam(ps, lr=torch.tensor(lr), foreach=False),
    "betas": lambda ps, lr: torch.optim.Adam(
        ps, lr=torch.tensor(lr), foreach=False,
        betas=(torch.tensor(1 - lr), torch.tensor(0.9)),
    ),
    "groups": lambda ps, lr: torch.optim.SGD(
        [{"params": [p], "lr": torch.tensor(lr * (k + 1))} for k, p in enumerate(ps)], momentum=0.9
    ),
    "custom": Custom,
}  # fmt: skip


def _model(plan: str, ranks: int, seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for p in model.parameters():
        p.data = (torch.arange(p.numel()).view_as(p) + seed).sin()
    return consistent.parallelize(model, Placement("cpu", range(ranks)), plan)


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


def _values(model: nn.Module, optimizer: Any) -> list[list[float]]:
    groups: list[Any] = []
    for group in optimizer.param_groups:
        groups += [v for k, v in group.items() if k != "params"]
    tensors = [*model.parameters(), *tensors_in(groups)]
    return [_plain(x).tolist() for x in tensors]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    return [x for v in inside for x in tensors_in(v)] if isinstance(
        value, dict | list | tuple
    ) else []  # fmt: skip


def _plain(x: Any) -> torch.Tensor:
    return (x.full() if isinstance(x, consistent.GlobalTensor) else x).detach()


def _saved(rank: int, ranks: int, folder: str) -> Any:
    found = {}
    for k, (name, make) in enumerate(MAKES.items()):
        model = _model("zero3", ranks, 0)
        optimizer = make(list(model.parameters()), 0.01)
        _step(model, optimizer)
        checkpoint.save(f"{folder}/{k}", model=model, optimizer=optimizer, wait=k % 2 == 0)
        checkpoint.wait()
        before = _values(model, optimizer)
        _step(model, optimizer)
        found[name] = before, _values(model, optimizer)
    return found


def _loaded(rank: int, ranks: int, plan: str, folder: str) -> Any:
    found = {}
    for k, (name, make) in enumerate(MAKES.items()):
        model = _model(plan, ranks, 1)
        optimizer = make(list(model.parameters()), 0.5)
        checkpoint.load(f"{folder}/{k}", model=model, optimizer=optimizer)
        before = _values(model, optimizer)
        _step(model, optimizer)
        found[name] = before, _values(model, optimizer)
    return found


def test_they_load_under_other_plans_and_ranks(tmp_path: Path) -> None:
    saved = pool(2).run(_saved, 2, str(tmp_path))[0]
    for ranks, plan in ((2, "data"), (2, "tensor"), (3, "zero3"), (3, "zero1")):
        loaded = pool(ranks).run(_loaded, ranks, plan, str(tmp_path))[0]
        for name in MAKES:
            assert loaded[name][0] == saved[name][0], (name, plan)
            for a, b in zip(loaded[name][1], saved[name][1], strict=True):
                torch.testing.assert_close(torch.tensor(a), torch.tensor(b))
