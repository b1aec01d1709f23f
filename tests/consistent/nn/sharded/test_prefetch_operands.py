"""Parameters that ops gather for themselves come while the op before runs, where ranks share no
memory: with the bits of shared memory, whatever is done to them between two calls."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import Placement, S
from mirrored.transports.counting import counting
from tests.mirrored.kinds import over_gloo
from tests.ranks import ON_ONE_AXIS, pool

ROWS = 1 << 16  # so many that an op gathers its weight, and not its input


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 11), nn.Linear(11, 9), nn.Linear(9, 2)
        self.norm = nn.LayerNorm(9)
        self.skips = self.saves = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self._middle, x, use_reentrant=False) if self.saves else self._middle(x)
        return self.last(x).square().mean()

    def _middle(self, x: Tensor) -> Tensor:
        x = self.second(x)
        return x if self.skips else self.norm(x)


def _net(n: int) -> tuple[Net, Tensor]:
    placement = Placement("cpu", range(n))
    torch.manual_seed(0)
    net, x = Net(), torch.randn(ROWS, 8)
    return (
        consistent.parallelize(net, placement, {"*": S(0)}),  # type: ignore[return-value]
        consistent.distribute(x, placement, S(0)),
    )


def _step(net: Net, x: Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = net(x)
    loss.backward()
    optimizer.step()
    return loss.item()


def _trained(rank: int, n: int) -> list[Any]:
    net, x = _net(n)
    optimizer, losses = torch.optim.AdamW(net.parameters()), []
    for step in range(12):
        net.skips, net.saves = step in (4, 5, 9), step in (6, 7)
        losses.append(_step(net, x, optimizer))
        if step == 2:
            with torch.no_grad():
                losses += [net(x).item() for _ in range(2)]
                net.second.weight.mul_(1.5)
                losses.append(net(x).item())
            with torch.inference_mode():
                losses.append(net(x).item())
        if step == 3:
            other = copy.deepcopy(net)
            losses.append(_step(other, x, torch.optim.SGD(other.parameters(), lr=0.1)))
            losses += [net(x).item(), other(x).item()]
        if step == 8:
            net.second.weight = nn.Parameter(net.second.weight.detach() * 0.5)
            optimizer = torch.optim.AdamW(net.parameters())
        if step == 10:
            loaded: Any = io.BytesIO()
            torch.save(net, loaded)
            loaded.seek(0)
            losses.append(torch.load(loaded, weights_only=False)(x).item())
    return [losses, *(p.full().tolist() for p in net.parameters())]  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_messages_give_the_bits_of_shared_memory(n: int) -> None:
    assert pool(n).run(over_gloo, _trained, n) == pool(n).run(_trained, n)


def _waits(rank: int, steps: int) -> list[list[bool]]:
    """Of each gather in forward, whether it is waited for at once; step by step."""
    net, x = _net(2)
    found = []
    for _ in range(steps):
        with counting() as sent:
            loss = net(x)
        found.append([call.waits for call in sent.calls if call.name == "all_gather"])
        loss.backward()
    return found


def test_an_op_waits_for_no_parameters_once_their_order_is_known() -> None:
    first, second, third = pool(2).run(over_gloo, _waits, 3)[0]
    assert first == [True] * 4  # weight and bias of one op come in one message
    assert second == third and sum(second) == 1, (second, third)


def _moved(rank: int) -> list[bool]:
    net, x = _net(2)
    net(x).backward()
    places = [hasattr(p, "_consistent_place") for p in net.parameters()]
    consistent.move(net, None, Placement("cpu", range(2)), "data")
    return [*places, any(hasattr(p, "_consistent_place") for p in net.parameters())]


def test_a_module_that_is_moved_forgets_what_came_next() -> None:
    assert pool(2).run(over_gloo, _moved) == [[True] * 8 + [False]] * 2
    assert pool(2).run(_moved) == [[False] * 9] * 2  # there is no link to keep busy
