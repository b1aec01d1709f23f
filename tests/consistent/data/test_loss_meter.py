"""LossMeter: the loss of a step travels with the gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, Placement, S
from consistent.data import LossMeter
from mirrored.transports.counting import counting
from tests.ranks import on_ranks
from tests.twins import GRIDS, randn


def run(place: Placement | None, steps: int = 3) -> tuple[list[float], torch.Tensor]:
    """Losses that the meter shows, and the last gradient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    if place is not None:
        model = consistent.parallelize(model, place)
    meter, shown = LossMeter(), []
    for step in range(steps):
        x, y = randn(5, 4, seed=step), randn(5, 3, seed=9)
        if place is not None:
            sbp = (S(0), *(B,) * (place.ndim - 1))
            x, y = (consistent.distribute(t, place, sbp) for t in (x, y))
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        meter(loss).backward()
        shown.append(meter.value)
        assert meter.value == shown[-1]
        if place is None:
            assert shown[-1] == loss.item()
    grad = model.weight.grad
    return shown, grad.full() if isinstance(grad, consistent.GlobalTensor) else grad


@on_ranks(2, 3, 4)
def test_shows_the_losses_of_one_process(rank: int) -> None:
    wanted, grad = run(None)
    given, own = run(Placement("cpu", GRIDS[torch.distributed.get_world_size()]))
    assert given == pytest.approx(wanted)
    torch.testing.assert_close(own, grad)


@on_ranks(2)
def test_sends_nothing_of_its_own(rank: int) -> None:
    place = Placement("cpu", [0, 1])
    run(place)
    w = consistent.ones(4, placement=place, sbp=B, requires_grad=True)
    x = consistent.ones(6, 4, placement=place, sbp=S(0))
    meter = LossMeter()
    meter((x @ w).sum())
    for given in (lambda loss: loss, meter):
        with counting() as counted:
            given((x @ w).sum()).backward()
        assert len(counted.calls) == 1
    with counting() as counted:
        assert meter.value == 24.0
    assert not counted.calls


@on_ranks(2)
def test_losses_of_one_step_add_up(rank: int) -> None:
    place = Placement("cpu", [0, 1])
    w = consistent.ones(4, placement=place, sbp=B, requires_grad=True)
    x = consistent.ones(6, 4, placement=place, sbp=S(0))
    meter = LossMeter()
    for _ in range(2):
        with consistent.no_sync():
            meter((x @ w).sum()).backward()
        meter((x @ w).sum()).backward()
        assert meter.value == 48.0
        with consistent.no_sync():
            meter((x @ w).sum()).backward()
        with pytest.raises(RuntimeError, match="inside no_sync"):
            _ = meter.value
        w.grad = None
        meter = LossMeter()


@on_ranks(3)
def test_a_rank_outside_has_no_number(rank: int) -> None:
    place = Placement("cpu", [0, 1])
    w = consistent.ones(4, placement=place, sbp=B, requires_grad=True)
    meter = LossMeter()
    meter(w.sum()).backward()
    assert (meter.value == 4.0) is (rank < 2)
