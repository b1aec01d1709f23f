"""Gradients in shares that are reduced and scattered while backward goes on: over messages, the
values and the bits of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, Placement, S
from consistent.autograd import buckets, scattering
from consistent.nn import Layouts, Plan
from mirrored import counting
from tests.each_of import each_of
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, ON_ONE_AXIS, pool
from tests.twins import GRIDS

STEPS = 20 if ALL else 5  # each third one sums two backwards, each second one keeps its memory
PLANS = ["data", "zero1", "zero2", "zero3", "tensor"]
ONE_BY_ONE = Plan({"*": Layouts((S(0),), use=(B,))}, keep_bytes=0)


class Net(nn.Module):
    """Layers of which the first weights are sent alone, and the others packed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(31, 64)
        self.layers = nn.Sequential(nn.Linear(64, 1100), nn.GELU(), nn.Linear(1100, 64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        return self.head(self.norm(self.layers(x) + self.layers(x.flip(2))))


def _net(placement: Placement, plan: Any, rows: int = 11) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = consistent.parallelize(Net(), placement, plan)
    tokens, labels = torch.randint(31, (rows, 3)), torch.randint(31, (rows, 3))
    return model, *(consistent.distribute(x, placement, S(0)) for x in (tokens, labels))  # type: ignore[return-value]


def _loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def _trained(rank: int, n: int, plan: str, steps: int) -> list[Any]:
    model, tokens, labels = _net(Placement("cpu", range(n)), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(steps):
        loss = _loss(model, tokens, labels)
        if step % 3 == 1:
            with consistent.no_sync():
                loss.backward()
            loss = _loss(model, tokens, labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    return [losses, *(p.full().tolist() for p in model.parameters())]  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", ON_ONE_AXIS)
@pytest.mark.parametrize("plan", PLANS)
def test_messages_give_the_bits_of_shared_memory(plan: str, n: int) -> None:
    by_messages = pool(n).run(over_gloo, _trained, n, plan, STEPS)
    assert by_messages == pool(n).run(_trained, n, plan, STEPS)


def _large_go_alone(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function`` where 256 KB are a large gradient: as the net's two larger weights are."""
    before, buckets.ALONE_BYTES = buckets.ALONE_BYTES, 256 << 10
    try:
        return function(rank, *args)
    finally:
        buckets.ALONE_BYTES = before


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_large_gradients_travel_by_themselves(n: int) -> None:
    sent = pool(n).run(over_gloo, _large_go_alone, _messages, n, "data")
    assert sent == [(5, 2)] * n
    by_messages = pool(n).run(over_gloo, _large_go_alone, _trained, n, "data", 6)
    assert by_messages == pool(n).run(_trained, n, "data", 6)


def _in_flight(rank: int, act: Callable[[nn.Module], None], only: int | None) -> None:
    """``act`` runs in backward, on rank ``only`` or on all, while gradients are on their way."""
    wanted = _gradients(None, None)
    seen = []

    def hook(module: nn.Module, *_: Any) -> None:
        if only is None or rank == only:
            seen.append(bool(scattering._state.waiting or scattering._state.in_flight))
            act(module)

    given = _gradients(hook, act)
    assert only not in (None, rank) or any(seen)
    for name, value in wanted.items():
        torch.testing.assert_close(given[name], value, msg=name)


def _gradients(hook: Any, act: Any) -> dict[str, Any]:
    model, tokens, labels = _net(Placement("cpu", GRIDS[2]), ONE_BY_ONE)
    if hook is not None:
        model.layers[0].register_full_backward_hook(hook)  # type: ignore[index, union-attr]
    for _ in range(2):
        _loss(model, tokens, labels).backward()
    assert not scattering._state.in_flight and not scattering._state.waiting
    return {name: p.grad.full() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def read(module: nn.Module) -> None:
    module.weight.grad  # noqa: B018 - reading is the act


def read_all(module: nn.Module) -> None:
    assert all(p.grad is None or p.grad.shape == p.shape for p in module.parameters())


@pytest.mark.parametrize("only", [None, 0, 1])
@pytest.mark.parametrize("act", [read, read_all])
def test_a_gradient_is_read_while_others_are_on_their_way(act: Any, only: int | None) -> None:
    pool(2).run(over_gloo, _in_flight, act, only)


class Tied(nn.Module):
    """A layer that is called three times, with another one between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.two.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two, self.one, self.last, self.one):
            x = layer(x).tanh()
        return x


def _read_at_each_module(rank: int, plan: Any, only: int | None, limit: int) -> None:
    """What is read at the hooks of modules changes no gradient, and is its object afterwards."""
    torch.manual_seed(1)
    plain, x = Tied().double(), torch.randn(6, 6, dtype=torch.float64)
    at = Placement("cpu", GRIDS[2])
    model, given = consistent.parallelize(plain, at, plan), consistent.distribute(x, at, S(0))
    read: list[tuple[str, Tensor]] = []

    def hook(*_: Any) -> None:
        if only is None or rank == only:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    read.append((name, p.grad))

    for layer in (model.one, model.two, model.last):  # type: ignore[union-attr]
        layer.register_full_backward_hook(hook)
    twin = Tied().double()
    twin.load_state_dict({name: p.full() for name, p in model.state_dict().items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SCATTERED_BUCKET_BYTES", limit)
        patch.setattr(buckets, "FIRST_BUCKET_BYTES", limit)
        patch.setattr(scattering, "IN_FLIGHT_BYTES", limit)
        for step in range(3):
            read.clear()
            model(given).square().sum().backward()
            twin(x).square().sum().backward()
            found: dict[str, Any] = dict(model.named_parameters())
            for name, p in twin.named_parameters():
                torch.testing.assert_close(found[name].grad.full(), p.grad, msg=name)
            assert all(found[name].grad is grad for name, grad in read)
            assert read or step == 0 or only not in (None, rank)


@each_of("limit", [0, 300, 1 << 20])
@each_of("only", [None, 0, 1])
@each_of("plan", ["zero2", "zero3", ONE_BY_ONE])
def test_gradients_are_read_between_two_of_their_addends(plan: Any, only: Any, limit: int) -> None:
    pool(2).run(over_gloo, _read_at_each_module, plan, only, limit)


def _raises(rank: int) -> None:
    model, tokens, labels = _net(Placement("cpu", GRIDS[2]), "zero3")

    def stop(*_: Any) -> None:
        raise ValueError("stop")

    handle = model.layers[0].register_full_backward_hook(stop)  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="stop"):
        _loss(model, tokens, labels).backward()
    assert not scattering._state.in_flight
    handle.remove()
    model.zero_grad()
    _loss(model, tokens, labels).backward()
    again, *_ = _net(Placement("cpu", GRIDS[2]), "zero3")
    _loss(again, tokens, labels).backward()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad.full(), q.grad.full()), name  # type: ignore[union-attr]


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    pool(2).run(over_gloo, _raises)


def _messages(rank: int, n: int, plan: Any) -> tuple[int, int]:
    """Messages of a step that is like the one before, and those that are waited for at once."""
    model, tokens, labels = _net(Placement("cpu", range(n)), plan, rows=12)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        with counting() as calls:
            optimizer.zero_grad()
            _loss(model, tokens, labels).backward()
            optimizer.step()
    return len(calls.calls), sum(call.waits for call in calls.calls)


# What is waited for: a word of each rank after the embedding, which may refuse a value, and one
# after the loss, with the number of labels that count; under zero1 and zero2 the updated shares, in
# one message; under zero3 the only gather; where modules gather one by one the first gather, and
# those of a layer that is called again; under tensor sums of activations.
STARTED = {"data": (3, 2), "zero1": (4, 3), "zero2": (4, 3), "zero3": (4, 3), "tensor": (11, 10)}


def test_modules_that_gather_one_by_one_wait_for_few_messages() -> None:
    assert pool(2).run(over_gloo, _messages, 2, ONE_BY_ONE) == [(15, 5)] * 2


@pytest.mark.parametrize("plan", PLANS)
def test_few_messages_are_waited_for_at_once(plan: str) -> None:
    assert pool(2).run(over_gloo, _messages, 2, plan) == [STARTED[plan]] * 2
