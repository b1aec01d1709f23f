"""Copies of parameters in float32: steps that a parameter in bfloat16 is too coarse for add up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn import master_weights
from tests.ranks import SIZES, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn

PLANS = ["data", "zero1", "zero2", "zero3"]


def net(at: Laid, plan: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).bfloat16()
    if at.placement is None:
        return model
    given: Any = plan if at.placement.ndim == 1 else {"0": plan, "1": "data"}
    return consistent.parallelize(model, at.placement, given)


def set_gradients(at: Laid, model: Any, step: int) -> None:
    for k, p in enumerate(model.parameters()):
        grad = randn(*p.shape, seed=10 * step + k).bfloat16()
        if at.placement is None:
            p.grad = grad
        else:
            axes = at.placement.ndim
            p.grad = consistent.distribute(grad, at.placement, (B,) * axes)


def optimizer_of(at: Laid, model: Any) -> Any:
    """Ours; on plain tensors, one of copies that are made and written back by hand."""
    if at.placement is not None:
        return master_weights(torch.optim.AdamW(model.parameters(), lr=1e-3))
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-3)
    step = optimizer.step

    def by_hand() -> None:
        for c, p in zip(copies, model.parameters(), strict=True):
            c.grad = p.grad.float()
        step()
        with torch.no_grad():
            for c, p in zip(copies, model.parameters(), strict=True):
                p.copy_(c)

    optimizer.step = by_hand  # type: ignore[method-assign]
    return optimizer


def trained(at: Laid, plan: str) -> Any:
    model = net(at, plan)
    optimizer = optimizer_of(at, model)
    for step in range(4):
        set_gradients(at, model, step)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return (
        [p.grad for p in model.parameters()],
        dict(model.state_dict()),
        {
            number: {name: kept[name] for name in ("exp_avg", "exp_avg_sq")}
            for number, kept in state.items()
        },
    )


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_copies_in_float32(plan: str, world: int) -> None:
    pool(world).run(compare, trained, GRIDS[world], plan)


@on_ranks(2)
def test_copies_and_state_lie_as_the_step_and_parameters_stay_short(rank: int) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    model = net(at, "zero1")
    optimizer = optimizer_of(at, model)
    set_gradients(at, model, 0)
    optimizer.step()
    kept = optimizer.state_dict()["state"][0]
    assert kept["master"].sbp == kept["exp_avg"].sbp == (S(0),)
    assert kept["master"].dtype == kept["exp_avg"].dtype == torch.float32
    weight = model[0].weight
    assert weight.dtype is torch.bfloat16 and weight.sbp == (B,)
    assert torch.equal(weight.full(), kept["master"].full().bfloat16())


@on_ranks(2)
def test_they_are_saved_and_loaded_with_the_state(rank: int) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    for plan in PLANS:
        model = net(at, plan)
        optimizer = optimizer_of(at, model)
        set_gradients(at, model, 0)
        optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        other = net(at, plan)
        other.load_state_dict(saved[0])
        again = optimizer_of(at, other)
        again.load_state_dict(saved[1])
        for each, opt in ((model, optimizer), (other, again)):
            for step in (1, 2):
                set_gradients(at, each, step)
                opt.step()
        masters = [
            [kept["master"].full() for kept in opt.state_dict()["state"].values()]
            for opt in (optimizer, again)
        ]
        assert_same(masters[1], masters[0], rtol=0, atol=0)


@pytest.mark.parametrize("data", [False, True])
@on_ranks(2)
def test_a_parameter_that_was_written_to_is_copied_anew(rank: int, data: bool) -> None:
    at = Laid(Placement("cpu", [0, 1]))
    model = net(at, "zero1")
    optimizer = optimizer_of(at, model)
    set_gradients(at, model, 0)
    optimizer.step()
    with torch.no_grad():
        (model[0].weight.data if data else model[0].weight).fill_(3.0)
    optimizer.step()
    assert torch.allclose(model[0].weight.full().float(), torch.tensor(3.0), atol=0.05)


@on_ranks(2)
def test_plain_parameters_and_late_calls_are_refused(rank: int) -> None:
    with pytest.raises(TypeError, match="plain tensor.*parallelize"):
        master_weights(torch.optim.SGD(nn.Linear(2, 2).bfloat16().parameters(), lr=0.1))
    at = Laid(Placement("cpu", [0, 1]))
    model = net(at, "data")
    optimizer = torch.optim.AdamW(model.parameters())
    set_gradients(at, model, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="has stepped already"):
        master_weights(optimizer)
