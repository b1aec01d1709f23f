"""Facts about losses over split classes and rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from consistent.spec import B, P, Placement, S
from consistent.tensor.making.create import distribute
from mirrored.transports.counting import counting
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real, whole
from tests.ranks import pool

cross_entropy = torch._C._nn.cross_entropy_loss
MEAN, SUM = 1, 2


def test_split_classes_send_numbers_by_row_not_by_class() -> None:
    targets = whole(4, low=0, high=300)
    sent = []
    for classes in (300, 3000):
        made = run_form(
            "cross_entropy", cross_entropy, (real(4, classes), targets), (S(1), B), None, MEAN
        )
        sent.append({n for _, n in made})
    assert sent[0] == sent[1] and max(sent[0]) <= 2 * 3 * 4 * 8


def test_mean_divides_by_the_targets_that_are_not_ignored_anywhere() -> None:
    x, targets = real(6, 5), torch.tensor([0, -100, -100, 1, 2, 3])
    made = run_form("cross_entropy", cross_entropy, (x, targets), (S(0), S(0)), None, MEAN, out=P)
    torch.testing.assert_close(sum(y for y, _ in made), cross_entropy(x, targets, None, MEAN))


def test_all_targets_ignored_is_nan_as_in_torch() -> None:
    x, targets = real(6, 5), torch.full((6,), -100)
    made = run_form("cross_entropy", cross_entropy, (x, targets), (S(0), S(0)), None, MEAN, out=P)
    assert sum(y for y, _ in made).isnan()


def test_a_target_outside_the_classes_is_an_error() -> None:
    x, bad = real(2, 5), torch.tensor([1, 5])
    with pytest.raises((RuntimeError, IndexError)):
        run_form("cross_entropy", cross_entropy, (x, bad), (S(1), B), None, SUM)


def test_bfloat16_logits_give_a_bfloat16_loss_of_float32_sums() -> None:
    x, targets = real(3, 3000).to(torch.bfloat16), whole(3, low=0, high=3000)
    for y, _ in run_form("cross_entropy", cross_entropy, (x, targets), (S(1), B), None, SUM):
        torch.testing.assert_close(y, cross_entropy(x, targets, None, SUM))


def _losses(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, smoothing: float) -> tuple:
    """(loss, first gradient, gradient of the gradient's square) of one mean loss."""
    loss = F.cross_entropy(x, target, weight, ignore_index=1, label_smoothing=smoothing)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return loss.detach(), first.detach(), second


def _twice_on_ranks(rank: int, x: Any, target: Any, weight: Any, smoothing: float) -> list:
    logits = distribute(x, Placement("cpu", range(3)), "S(1)").requires_grad_()
    return [t.full() for t in _losses(logits, target, weight, smoothing)]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_split_classes_are_differentiable_twice(smoothing: float) -> None:
    x, weight = real(4, 7), torch.rand(7, dtype=torch.float64)
    target = torch.tensor([0, 1, 6, 3])
    wanted = _losses(x.clone().requires_grad_(), target, weight, smoothing)
    for got in pool(3).run(_twice_on_ranks, x, target, weight, smoothing):
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_split_classes_are_differentiable_forwards() -> None:
    x, tangent, target = real(4, 7), real(4, 7), torch.tensor([0, 1, 6, 3])
    _, wanted = torch.func.jvp(lambda y: cross_entropy(y, target, None, MEAN), (x,), (tangent,))
    for got in pool(3).run(_forwards_on_ranks, x, tangent, target):
        torch.testing.assert_close(got, wanted)


def _forwards_on_ranks(rank: int, x: Any, tangent: Any, target: Any) -> torch.Tensor:
    placement = Placement("cpu", range(3))
    with forward_ad.dual_level():
        x, tangent = (distribute(t, placement, "S(1)") for t in (x, tangent))
        loss = F.cross_entropy(forward_ad.make_dual(x, tangent), target)
        return forward_ad.unpack_dual(loss).tangent.full()


def _gradient_on_ranks(rank: int, x: Any, target: Any) -> tuple[torch.Tensor, int]:
    logits = distribute(x, Placement("cpu", range(3)), "S(1)").requires_grad_()
    loss = F.cross_entropy(logits, target)
    with counting() as log:
        loss.backward()
    return logits.grad.full(), log.bytes


def test_backward_of_a_mean_sends_one_number() -> None:
    x, target = real(64, 50), whole(64, low=0, high=50)
    leaf = x.clone().requires_grad_()
    F.cross_entropy(leaf, target).backward()
    for grad, sent in pool(3).run(_gradient_on_ranks, x, target):
        torch.testing.assert_close(grad, leaf.grad)
        assert sent <= 4 * 8


def test_bfloat16_logits_get_a_bfloat16_gradient_of_float32_sums() -> None:
    x = real(5, 4000).to(torch.bfloat16)
    target = whole(5, low=0, high=4000)
    leaf = x.double().requires_grad_()
    F.cross_entropy(leaf, target).backward()
    for grad, _ in pool(3).run(_gradient_on_ranks, x, target):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), leaf.grad, rtol=1e-2, atol=1e-9)


WAVES = torch.arange(28, dtype=torch.float64).view(4, 7).sin()


def _written_into(rank: int) -> list[float]:
    placement = Placement("cpu", [0, 1, 2])
    x = distribute(WAVES.clone(), placement, S(1)).requires_grad_()
    loss = F.cross_entropy(x, torch.arange(4))
    loss.mul_(3).backward()
    assert x.grad is not None
    return [loss.item(), *x.grad.full().flatten().tolist()]


def test_the_loss_of_split_classes_may_be_written_into() -> None:
    x = WAVES.clone().requires_grad_()
    loss = 3 * F.cross_entropy(x, torch.arange(4))
    loss.backward()
    assert x.grad is not None
    wanted = [loss.item(), *x.grad.flatten().tolist()]
    assert pool(3).run(_written_into) == [pytest.approx(wanted, abs=1e-14)] * 3
