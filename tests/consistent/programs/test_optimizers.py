"""torch's optimizers, clipping and state dicts, unchanged, on global parameters."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, P, S
from mirrored import counting
from tests.ranks import ALL, in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, compare, randn

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **k: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **k
    ),
    "plain_sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
    "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
    "rmsprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, **k),
    "nadam": lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k),
}
KINDS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("sgd", "plain_sgd", "adam", "adamw", "adagrad")


def _model(at: Laid) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    return at.module(net, {"0.weight": S(0), "0.bias": S(0), "3.weight": S(1)})


def _step(net: Any, optimizer: torch.optim.Optimizer, x: Any) -> Any:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def _train(at: Laid, name: str, kind: str, entry: Any = None) -> Any:
    net = _model(at)
    optimizer = OPTIMIZERS[name](net.parameters(), **KINDS[kind])
    losses = [_step(net, optimizer, at(randn(5, 4, seed=i), entry or S(0))) for i in range(3)]
    return losses, list(net.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_plain_torch(name: str, kind: str) -> None:
    if kind == "fused" and name not in FUSED:
        pytest.skip("torch has no fused form of it on CPU")
    turn = list(OPTIMIZERS).index(name) + list(KINDS).index(kind)
    for world in in_turn(turn):
        pool(world).run(compare, _train, GRIDS[world], name, kind)


def _clipped(at: Laid, kind: bool | None, norm: float) -> Any:
    net = _model(at)
    net(at(randn(5, 4), S(0))).square().sum().backward()
    total = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm, foreach=kind)
    by_value = [p.grad.clone() for p in net.parameters()]
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    return (
        total,
        nn.utils.get_total_norm([p.grad for p in net.parameters()], norm),
        by_value,
        [p.grad for p in net.parameters()],
    )


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_uses_the_norm_of_the_whole(foreach: bool | None, norm: float) -> None:
    """Of one axis or two in turn."""
    on_two = ((None, False, True).index(foreach) + (2.0, 1.0, float("inf")).index(norm)) % 2 == 0
    for world in (3, 4) if ALL else (4 if on_two else 3,):
        pool(world).run(compare, _clipped, GRIDS[world], foreach, norm)


@on_ranks(2)
def test_clipping_sends_a_few_bytes(rank: int) -> None:
    at = Laid(consistent.placement("cpu", [0, 1]))
    net = _model(at)
    net(at(randn(5, 4), S(0))).square().sum().backward()
    with counting() as calls:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert calls.bytes <= 64, calls.calls
    with counting() as calls:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)
    assert calls.names == ["all_reduce"] and calls.bytes <= 64, calls.calls


def _schedule(at: Laid) -> Any:
    net = _model(at)
    optimizer = torch.optim.AdamW(
        [
            {"params": net[0].parameters(), "lr": 0.1},
            {"params": [*net[2].parameters(), *net[3].parameters()]},
        ],
        lr=0.01,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for i in range(3):
        _step(net, optimizer, at(randn(5, 4, seed=i), S(0)))
        schedule.step()
    return list(net.parameters())


def _resumed(at: Laid) -> Any:
    """Saved as bytes after two steps; a fresh model and optimizer do the third."""
    net = _model(at)
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    for i in range(2):
        _step(net, optimizer, at(randn(5, 4, seed=i), S(0)))
    buffer = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh = _model(at)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    other = OPTIMIZERS["adamw"](fresh.parameters())
    fresh.load_state_dict(saved["net"])
    other.load_state_dict(saved["optimizer"])
    _step(fresh, other, at(randn(5, 4, seed=2), S(0)))
    _step(net, optimizer, at(randn(5, 4, seed=2), S(0)))
    for a, b in zip(net.parameters(), fresh.parameters(), strict=True):
        assert bool((a == b).all())
    return (
        list(fresh.state_dict()),
        list(fresh.parameters()),
        [p.requires_grad for p in fresh.parameters()],
    )


def _loaded(at: Laid) -> Any:
    """A plain state dict goes into a global module, and with assign=True a global one."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    net = _model(at)
    net.load_state_dict(plain.state_dict())
    kept = [p.clone() for p in net.parameters()]
    other = _model(at)
    other.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}, assign=True)
    return kept, list(other.parameters())


def _state_lies_with_its_parameter(at: Laid) -> Any:
    net = _model(at)
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    _step(net, optimizer, at(randn(5, 4), S(0)))
    if at.placement is not None:
        for p in net.parameters():
            assert optimizer.state[p]["exp_avg"].sbp == p.sbp == p.grad.sbp
    return [optimizer.state[p]["exp_avg"] for p in net.parameters()]


def _batches_lie_otherwise(at: Laid) -> Any:
    return [_train(at, "adamw", "foreach", entry) for entry in (B, P, S(1))]


def _gradients_summed_over_micro_batches(at: Laid) -> Any:
    net = _model(at)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    for i in range(4):
        loss = net(at(randn(5, 4, seed=i), S(0))).square().mean() / 2
        if i % 2 == 0:
            with consistent.no_sync():
                loss.backward()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=i == 1)
    return list(net.parameters())


def _closure(at: Laid) -> Any:
    net, x = _model(at), at(randn(5, 4), S(0))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure), list(net.parameters())


CASES = [
    _schedule, _resumed, _loaded, _state_lies_with_its_parameter, _batches_lie_otherwise,
    _gradients_summed_over_micro_batches, _closure,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_torch(case: Callable[..., Any]) -> None:
    for world in in_turn(CASES.index(case)):
        pool(world).run(compare, case, GRIDS[world])
