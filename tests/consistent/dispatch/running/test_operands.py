"""Operands that one op gathers travel in one message where ranks share no memory, and gradients of
leaves among them while backward goes on: with the values of torch and the bits of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import consistent
from consistent import B, Placement, S
from mirrored.transports.counting import counting
from tests.mirrored.kinds import over_gloo
from tests.ranks import ON_ONE_AXIS, pool

Leaves = tuple[Tensor, ...]


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).square().mean()


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = weight[: x.shape[1]]
    return (F.layer_norm(x, x.shape[1:], rows[:, 0], bias[: x.shape[1]]) * x).square().mean()


def _twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, weight, bias)[:, :6]), weight, bias).square().mean()


NETS: dict[str, Callable[..., Tensor]] = {"linear": _linear, "norm": _norm, "twice": _twice}


def _plain() -> Leaves:
    torch.manual_seed(0)
    return torch.randn(64, 6), torch.randn(7, 6), torch.randn(7)


def _leaves(n: int, laid: bool) -> Leaves:
    placement = Placement("cpu", range(n))
    made = (consistent.distribute(x, placement, S(0)) if laid else x for x in _plain())
    return tuple(x.requires_grad_() for x in made)


def _whole(x: Any) -> Tensor:
    return x.full() if isinstance(x, consistent.GlobalTensor) else x


def _trained(rank: int, net: str, n: int, laid: bool, accumulate: bool) -> list[list[float]]:
    """The values after three steps by hand, and gradients asked for by ``torch.autograd.grad``."""
    leaves = _leaves(n, laid)
    for step in range(3):
        if accumulate and step == 1:
            with consistent.no_sync() if laid else nullcontext():
                NETS[net](*leaves).backward()
        loss = NETS[net](*leaves)
        loss.backward()
        with torch.no_grad():
            for x in leaves:
                x -= 0.1 * x.grad  # type: ignore[operator]
        for x in leaves:
            x.grad = None
    asked = torch.autograd.grad(NETS[net](*leaves), leaves, create_graph=True)
    curved = torch.autograd.grad(sum(g.square().sum() for g in asked), leaves)
    return [_whole(x).detach().flatten().tolist() for x in (*leaves, *asked, *curved)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_values_are_those_of_torch_and_of_shared_memory(n: int, net: str, accumulate: bool) -> None:
    by_messages = pool(n).run(over_gloo, _trained, net, n, True, accumulate)
    assert by_messages == pool(n).run(_trained, net, n, True, accumulate)
    for found, wanted in zip(by_messages[0], _trained(0, net, n, False, accumulate), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))


def _sent(rank: int, n: int, hooked: bool) -> tuple[list[Any], list[Any]]:
    """(name, whether it is waited for) of the messages of forward and of backward."""
    placement = Placement("cpu", range(n))
    x, weight, bias = _leaves(n, True)
    x = consistent.distribute(torch.randn(1 << 16, 6), placement, S(0))
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda leaf: None)
    with counting() as forward:
        loss = _linear(x, weight, bias)
    with counting() as backward:
        loss.backward()
    assert weight.grad.sbp == bias.grad.sbp == (S(0),)  # type: ignore[union-attr]
    return [(c.name, c.waits) for c in forward.calls], [(c.name, c.waits) for c in backward.calls]


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_an_op_sends_for_its_operands_once_and_waits_for_no_gradient(n: int) -> None:
    gather, scatter = ("all_gather", True), ("all_to_all", False)
    assert pool(n).run(over_gloo, _sent, n, False) == [([gather], [scatter])] * n
    # What a hook is shown is there when it runs.
    waited = ("all_to_all", True)
    assert pool(n).run(over_gloo, _sent, n, True) == [([gather], [waited, scatter])] * n


def _bound(rank: int) -> bool:
    """A B leaf, and one that is split, in one op."""
    placement = Placement("cpu", range(2))
    x, weight, bias = (consistent.distribute(x, placement, B) for x in _plain())
    x, weight = x.to_global(sbp=S(0)), weight.to_global(sbp=S(0)).requires_grad_()
    _linear(x, weight, bias.requires_grad_()).backward()
    leaves = _leaves(2, False)
    _linear(*leaves).backward()
    pairs = ((weight, leaves[1]), (bias, leaves[2]))
    return all(torch.allclose(a.grad.full(), b.grad) for a, b in pairs)  # type: ignore[union-attr]


def test_leaves_of_one_op_may_lie_in_different_ways() -> None:
    assert pool(2).run(over_gloo, _bound) == [True, True]
