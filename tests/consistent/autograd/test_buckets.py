"""How gradients travel: no_sync, buckets that overlap with backward, where they lie in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, S
from consistent.autograd import buckets
from mirrored import counting
from mirrored.transports.default import current
from tests.consistent.autograd.test_backward import (
    double_backward,
    gradients_add_up_over_backwards,
    leaf_used_often,
)
from tests.ranks import SIZES, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, net, randn

CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


def _accumulate(at: Laid, steps: int = 3) -> Any:
    x, w, b = net(at)
    for step in range(steps):
        loss = ((x * (step + 1)) @ w + b).square().sum()
        if step < steps - 1:
            with consistent.no_sync():
                loss.backward()
        else:
            loss.backward()
    return x.grad, w.grad, b.grad


@case
def no_sync_adds_up(at: Laid) -> Any:
    return _accumulate(at)


@case
def gradients_are_right_inside_no_sync(at: Laid) -> Any:
    x, w, b = net(at)
    seen = []
    with consistent.no_sync():
        for _ in range(2):
            (x @ w + b).square().sum().backward()
            seen += [w.grad.clone(), b.grad.clone()]
    return seen


@case
def synced_then_not_synced(at: Laid) -> Any:
    x, w, b = net(at)
    (x @ w + b).square().sum().backward()
    with consistent.no_sync():
        (x @ w - b).square().sum().backward()
    return x.grad, w.grad, b.grad


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any], world: int) -> None:
    pool(world).run(compare, function, GRIDS[world], timeout=30)


@on_ranks(2)
def test_no_sync_sends_nothing_and_one_bucket_serves_all_leaves(rank: int) -> None:
    at = Laid(consistent.placement("cpu", [0, 1]))
    x, w, b = net(at)
    with counting() as calls, consistent.no_sync():
        (x @ w + b).square().sum().backward()
    assert not calls.calls, calls.calls
    assert w.grad.sbp == (P,)
    with counting() as calls:
        (x @ w + b).square().sum().backward()
    assert w.grad.sbp == (B,) and len(calls.calls) == 1, calls.calls


def _check_overlap() -> None:
    at = Laid(consistent.placement("cpu", [0, 1]))
    torch.manual_seed(0)
    weights = [at.leaf(torch.randn(550, 550) / 20) for _ in range(12)]
    x = at(torch.randn(4, 550), S(0))
    events: list[str] = []
    transport = current()
    original = transport.all_reduce_async

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("all_reduce")
        return original(*args, **kwargs)

    transport.all_reduce_async = noted  # type: ignore[method-assign]
    weights[0].register_post_accumulate_grad_hook(lambda p: events.append("first layer"))
    try:
        y = x
        for w in weights:
            y = torch.tanh(y @ w)
        y.sum().backward()
    finally:
        del transport.all_reduce_async  # type: ignore[attr-defined]
    assert events.count("all_reduce") <= 3, events
    assert events.index("all_reduce") < events.index("first layer"), events


@on_ranks(2)
def test_reductions_start_before_backward_ends_and_are_few(rank: int) -> None:
    """Twelve B weights of 1.2 MB in buckets of 1 and 25 MB: the first goes before backward ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SHARED_ALONE_BYTES", 1 << 60)
        patch.setattr(buckets, "_share_memory", lambda *_: False)
        patch.setattr(buckets._state, "last_nbytes", {})  # as in the first backward of a process
        _check_overlap()


def _same_with_limits(rank: int, first: int, later: int, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "FIRST_BUCKET_BYTES", first)
        patch.setattr(buckets, "BUCKET_BYTES", later)
        patch.setattr(buckets, "SHARED_BUCKET_BYTES", later)
        patch.setattr(buckets, "SHARED_ALONE_BYTES", at_once)
        for function in (
            leaf_used_often,
            _accumulate,
            gradients_add_up_over_backwards,
            double_backward,
        ):
            compare(rank, function, [0, 1])


@pytest.mark.parametrize("sizes", [(1, 1), (1, 100), (100, 1)])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 60])
def test_bucket_sizes_change_no_value(sizes: tuple[int, int], at_once: int) -> None:
    pool(2).run(_same_with_limits, *sizes, at_once)


def _summed_where_they_lie(rank: int) -> list[Any]:
    at = Laid(consistent.placement("cpu", [0, 1]))
    x, seen = at.leaf(randn(4, 200), S(0)), []
    large, turned = (at.leaf(randn(200, 200, seed=k), B) for k in (1, 2))
    for leaf in (large, turned):  # a user's hook, after ours
        leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(str(leaf.grad.sbp)))
    with counting() as log:
        ((x @ large) @ turned.t()).square().sum().backward()
    return [seen, log.names.count("all_reduce")]


def test_large_gradients_are_whole_in_hooks_where_ranks_share_memory() -> None:
    assert pool(2).run(_summed_where_they_lie) == [[["(B,)"] * 2, 2]] * 2


@on_ranks(2)
def test_writing_into_a_gradient_whose_sum_is_on_the_way_raises(rank: int) -> None:
    at = Laid(consistent.placement("cpu", [0, 1]))
    x, w, b = net(at)

    def write(_: Any) -> None:
        b.grad.mul_(2)

    x.register_hook(write)
    with pytest.raises(RuntimeError, match="a hook wrote into the gradient of another leaf"):
        (x.sin() @ w + b).square().sum().backward()


@on_ranks(2)
def test_one_rank_may_read_a_gradient_while_backward_runs(rank: int) -> None:
    at = Laid(consistent.placement("cpu", [0, 1]))
    x, w, b = net(at)
    seen: list[Any] = []
    if rank == 1:
        x.register_hook(lambda _: seen.append((b.grad.shape, str(b.grad.sbp))))
    (x.sin() @ w + b).square().sum().backward()
    assert seen == ([(torch.Size([3]), "(P,)")] if rank == 1 else [])
    assert b.grad.sbp == (B,)


@on_ranks(2)
def test_a_backward_that_raised_leaves_nothing_behind(rank: int) -> None:
    at = Laid(consistent.placement("cpu", [0, 1]))
    x, w, b = net(at)

    def fail(g: Any) -> None:
        raise ZeroDivisionError

    handle = x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        (x @ w + b).square().sum().backward()
    handle.remove()
    for t in (x, w, b):
        t.grad = None
    (x @ w + b).square().sum().backward()
    found = x.grad, w.grad, b.grad
    x, w, b = net(Laid(None))
    (x @ w + b).square().sum().backward()
    assert_same(found, (x.grad, w.grad, b.grad))


@on_ranks(4)
def test_gradients_lie_as_their_leaves_and_those_of_grad_in_the_dual(rank: int) -> None:
    placement = consistent.placement("cpu", [[0, 1], [2, 3]])
    at = Laid(placement)
    for entries, wanted in [
        ((S(0), B), (S(0), B)),
        ((P, B), (B, B)),
        ((B, P), (B, B)),
        ((S(0), P), (S(0), B)),
    ]:
        x = at.leaf(randn(4, 4), *entries)
        (x * x).sum().backward()
        assert x.grad.sbp == wanted and x.grad.placement == placement
        (g,) = torch.autograd.grad((x * x).sum(), x)
        assert g.sbp == x._spec.dual.sbp
