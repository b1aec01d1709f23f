"""Every way in which torch touches ``.grad``: values, object identity and what is in place.

A case returns what plain torch gives for it, facts such as ``w.grad is g`` among the values, for
leaves of every layout; buckets of several sizes and sums at once must not change any of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import B, P, S
from consistent.autograd import buckets
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, ON_ONE_AXIS, SIZES, in_turn, pool
from tests.twins import GRIDS, Laid, compare, distinct, randn

LAYOUTS = [(B, B), (S(0), B), (B, S(1)), (P, B), (S(0), S(1)), (B, P), (P, P)]
CASES: list[Callable[..., Any]] = []


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(at, w)`` for a leaf ``w`` of shape (4, 3) in every layout."""
    CASES.append(function)
    return function


def in_every_layout(at: Laid, function: Callable[..., Any]) -> list[Any]:
    return [function(at, at.leaf(randn(4, 3), *layout)) for layout in LAYOUTS]


def loss_of(at: Laid, w: Any, step: int = 1) -> Any:
    return ((at(randn(5, 4, seed=7), S(0)) * step) @ w).sin().square().sum()


def value(x: Any) -> Any:
    return x.detach().clone()


# -- accumulation ----------------------------------------------------------------------------------


@case
def held_by_name_over_three_backwards(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    g, seen = w.grad, []
    for step in (2, 3):
        loss_of(at, w, step).backward()
        seen += [w.grad is g, value(g)]
    return seen


@case
def an_alias_of_the_gradient_sees_what_is_added(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    alias = w.grad.detach()
    version = alias._version
    loss_of(at, w, 2).backward()
    return alias, w.grad, alias._version > version


@case
def held_gradient_stays_right_while_the_next_backward_runs(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    g, seen = w.grad, []
    w.register_hook(lambda _: seen.append(value(g)))
    loss_of(at, w, 2).backward()
    return seen, g


@case
def retained_graph(at: Laid, w: Any) -> Any:
    loss = loss_of(at, w)
    loss.backward(retain_graph=True)
    g = w.grad
    loss.backward(retain_graph=True)
    loss.backward()
    return w.grad is g, g


@case
def several_roots_and_uses(at: Laid, w: Any) -> Any:
    torch.autograd.backward([loss_of(at, w), (w * w).sum(), (w @ w.T).sum()])
    return w.grad


@case
def zeroed_in_place(at: Laid, w: Any) -> Any:
    optimizer = torch.optim.SGD([w], lr=0.1)
    loss_of(at, w).backward()
    g = w.grad
    optimizer.zero_grad(set_to_none=False)
    zero = value(g)
    loss_of(at, w, 2).backward()
    return zero, w.grad is g, g


@case
def set_to_none_and_deleted(at: Laid, w: Any) -> Any:
    optimizer = torch.optim.SGD([w], lr=0.1)
    loss_of(at, w).backward()
    g = w.grad
    optimizer.zero_grad()
    gone = w.grad is None
    loss_of(at, w, 2).backward()
    h = w.grad
    del w.grad
    deleted = w.grad is None
    loss_of(at, w, 3).backward()
    return gone, deleted, g, h, w.grad, w.grad is g, w.grad is h


@case
def changed_in_place_between_backwards(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    w.grad.mul_(3)
    w.grad[0] = 1.0
    loss_of(at, w, 2).backward()
    nn.utils.clip_grad_norm_([w], 0.5)
    clipped = value(w.grad)
    loss_of(at, w, 2).backward()
    return clipped, w.grad


@case
def a_flat_buffer_collects_gradients(at: Laid, w: Any) -> Any:
    buffer = torch.zeros_like(w.detach())
    w.grad = buffer[:, :]
    for step in (1, 2):
        loss_of(at, w, step).backward()
    return buffer, w.grad


@case
def a_gradient_that_is_zero(at: Laid, w: Any) -> Any:
    (w * 0.0).sum().backward()
    first = value(w.grad)
    loss_of(at, w).backward()
    return first, w.grad


@case
def used_without_effect(at: Laid, w: Any) -> Any:
    v = at.leaf(randn(4, 3, seed=3), S(0))
    torch.where(at(torch.zeros(4, 3, dtype=torch.bool)), w, v).sum().backward()
    return w.grad, v.grad


@case
def strides_follow_the_leaf(at: Laid, w: Any) -> Any:
    # Two rows and columns a rank or more: of one row torch does not say which dim is the outer one.
    t = w.detach().repeat(2, 2).T.contiguous().T.requires_grad_()
    t.sin().sum().backward()
    first = t.grad.stride()
    t.sin().sum().backward()
    return first, t.grad.stride(), t.grad


@case
def gradients_that_two_leaves_share(at: Laid, w: Any) -> Any:
    v = at.leaf(randn(12, seed=3))
    (w + v.view(4, 3)).sin().sum().backward()
    g, h = value(w.grad), value(v.grad)
    (w.view(12) + v).sin().sum().backward()
    return g, h, w.grad, v.grad


@case
def gradients_that_are_views_of_one(at: Laid, w: Any) -> Any:
    v = at.leaf(randn(2, 3, seed=3))
    torch.cat([w, v]).sin().sum().backward()
    torch.cat([v, w]).sin().sum().backward()
    return w.grad, v.grad


# -- graphs of gradients ---------------------------------------------------------------------------


@case
def create_graph_twice(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward(create_graph=True)
    g, first = w.grad, value(w.grad)
    loss_of(at, w, 2).backward(create_graph=True)
    h = w.grad
    w.grad = None
    (h * h).sum().backward()
    return h is g, g, first, h, w.grad, g.requires_grad


@case
def create_graph_where_the_gradient_is_constant(at: Laid, w: Any) -> Any:
    w.sum().backward(create_graph=True)
    g = w.grad
    w.sum().backward(create_graph=True)
    return w.grad is g, g, w.grad, g.requires_grad


@case
def create_graph_then_without(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward(create_graph=True)
    g = w.grad
    loss_of(at, w, 2).backward()
    return w.grad is g, g, g.requires_grad


@case
def without_then_create_graph(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    g = w.grad
    loss_of(at, w, 2).backward(create_graph=True)
    h = w.grad
    w.grad = None
    (h * h).sum().backward()
    return h is g, g, h, w.grad


@case
def second_gradient_of_an_accumulated_one(at: Laid, w: Any) -> Any:
    for step in (1, 2, 3):
        loss_of(at, w, step).backward(create_graph=True)
    (second,) = torch.autograd.grad(w.grad.square().sum(), w)
    return w.grad, second


# -- autograd.grad and inputs= ---------------------------------------------------------------------


@case
def autograd_grad_leaves_the_gradient_alone(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    g, version = w.grad, w.grad._version
    w.register_hook(lambda grad: grad * 2)
    (found,) = torch.autograd.grad(loss_of(at, w, 2), w)
    (again,) = torch.autograd.grad(loss_of(at, w, 2), w, create_graph=True)
    return found, again, w.grad is g, g, g._version == version


@case
def autograd_grad_of_a_fresh_leaf_gives_it_none(at: Laid, w: Any) -> Any:
    (found,) = torch.autograd.grad(loss_of(at, w), w)
    return found, w.grad is None


@case
def backward_into_given_inputs(at: Laid, w: Any) -> Any:
    v = at.leaf(randn(4, 3, seed=3), B, S(0))
    loss_of(at, w * v).backward(inputs=[v])
    none, g = w.grad is None, v.grad
    loss_of(at, w * v, 2).backward(inputs=[w, v])
    return none, v.grad is g, w.grad, v.grad


@case
def backward_into_a_result(at: Laid, w: Any) -> Any:
    y = w * 2
    loss_of(at, y).backward(inputs=[y])
    return w.grad is None, y.grad


# -- hooks -----------------------------------------------------------------------------------------


@case
def tensor_hook_that_changes_the_gradient(at: Laid, w: Any) -> Any:
    w.register_hook(lambda g: g * 2 + 1)
    w.register_hook(lambda g: g.sin())
    for step in (1, 2):
        loss_of(at, w, step).backward()
    return w.grad


@case
def tensor_hook_that_keeps_its_gradient(at: Laid, w: Any) -> Any:
    kept: list[Any] = []
    w.register_hook(lambda g: kept.append(g))
    for step in (1, 2):
        loss_of(at, w, step).backward()
    return kept, w.grad


@case
def removed_hook(at: Laid, w: Any) -> Any:
    handle = w.register_hook(lambda g: g * 100)
    loss_of(at, w).backward()
    handle.remove()
    loss_of(at, w, 2).backward()
    return w.grad


@case
def hook_of_the_first_kind_after_a_backward(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    w.register_hook(lambda g: g * 2)
    loss_of(at, w, 2).backward()
    return w.grad


@case
def post_accumulate_hook_sees_the_gradient_of_all(at: Laid, w: Any) -> Any:
    seen: list[Any] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append((p is w, p.grad, value(p.grad))))
    for step in (1, 2):
        loss_of(at, w, step).backward()
    return seen, seen[0][1] is seen[1][1], w.grad is seen[0][1]


@case
def post_accumulate_hook_that_steps_and_frees(at: Laid, w: Any) -> Any:
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def step(p: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(step)
    for count in (1, 2):
        loss_of(at, w, count).backward()
    return w, w.grad is None


@case
def post_accumulate_hook_that_is_removed(at: Laid, w: Any) -> Any:
    seen: list[Any] = []
    handle = w.register_post_accumulate_grad_hook(lambda p: seen.append(value(p.grad)))
    loss_of(at, w).backward()
    handle.remove()
    loss_of(at, w, 2).backward()
    return seen, w.grad


@case
def gradient_read_in_a_hook_of_another_tensor(at: Laid, w: Any) -> Any:
    """The gradient of ``w`` is there when that of ``first`` arrives, which it was computed from."""
    first, seen = at.leaf(randn(5, 4, seed=3), S(0)), []
    first.register_hook(lambda _: seen.append(w.grad))
    for step in (1, 2):
        ((first * step).sin() @ w).square().sum().backward()
        w.register_hook(lambda g: g + 1)
    return seen, w.grad, first.grad


@case
def gradient_dropped_in_a_hook_of_another_tensor(at: Laid, w: Any) -> Any:
    first = at.leaf(randn(5, 4, seed=3), S(0))

    def drop(_: Any) -> None:
        w.grad = None

    first.register_hook(drop)
    (first.sin() @ w).square().sum().backward()
    return w.grad is None


@case
def multi_grad_hook(at: Laid, w: Any) -> Any:
    v, seen = at.leaf(randn(4, 3, seed=3)), []
    torch.autograd.graph.register_multi_grad_hook([w, v], lambda gs: seen.extend(map(value, gs)))
    for step in (1, 2):
        loss_of(at, w * v, step).backward()
    return seen, w.grad, v.grad


@case
def backward_in_a_hook(at: Laid, w: Any) -> Any:
    y = w * 2

    def nested(_: Any) -> None:
        with torch.enable_grad():
            loss_of(at, w, 3).backward()

    y.register_hook(nested)
    loss_of(at, y).backward()
    first = value(w.grad)
    loss_of(at, y.detach() + w).backward()
    return first, w.grad


@case
def retains_grad_of_a_leaf_is_its_gradient(at: Laid, w: Any) -> Any:
    w.retain_grad()
    loss_of(at, w).backward()
    return w.retains_grad, w.grad


# -- what users assign and copy --------------------------------------------------------------------


@case
def gradients_of_other_layouts_are_assigned(at: Laid, w: Any) -> Any:
    found = []
    for layout in LAYOUTS:
        w.grad = g = at(randn(4, 3, seed=5), *layout)
        same = w.grad is g
        loss_of(at, w).backward()
        found += [same, w.grad is g, value(w.grad)]
    return found


@case
def a_hook_after_a_gradient_of_another_layout(at: Laid, w: Any) -> Any:
    found = []
    for layout in LAYOUTS:
        leaf = w.detach().clone().requires_grad_()
        leaf.grad = at(randn(4, 3, seed=5), *layout)
        leaf.register_hook(lambda g: g * 2)
        loss_of(at, leaf).backward()
        found.append(leaf.grad)
    return found


@case
def other_layouts_under_create_graph(at: Laid, w: Any) -> Any:
    found = []
    for layout in LAYOUTS:
        w.grad = g = at(randn(4, 3, seed=5), *layout)
        loss_of(at, w).backward(create_graph=True)
        h, w.grad = w.grad, None
        h.square().sum().backward()
        found += [h is g, g, h, w.grad]
    return found


@case
def assigned_gradients_must_fit(at: Laid, w: Any) -> Any:
    found = []
    for wrong in (randn(4, 4), randn(4, 3).float(), w, "a text"):
        try:
            w.grad = wrong
        except (RuntimeError, TypeError) as error:
            found.append(type(error).__name__)
    return found, w.grad is None


@case
def deep_copies_have_gradients_of_their_own(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    twin = copy.deepcopy(w)
    loss_of(at, w, 2).backward()
    loss_of(at, twin, 3).backward()
    return twin.grad is w.grad, w.grad, twin.grad


@case
def tied_parameters(at: Laid, w: Any) -> Any:
    one, two = nn.Linear(4, 3, bias=False).double(), nn.Linear(4, 3, bias=False).double()
    one.weight = two.weight = nn.Parameter(w.detach().T)
    seen = []
    for _ in range(2):
        x = at(randn(5, 4, seed=7), S(0))
        (one(x) * two(x)).sum().backward()
        seen.append(one.weight.grad is two.weight.grad)
    return seen, one.weight.grad


@case
def data_replaced_between_backwards(at: Laid, w: Any) -> Any:
    loss_of(at, w).backward()
    g = w.grad
    w.data = w.data * 2
    loss_of(at, w).backward()
    return w.grad is g, g


@case
def leaves_made_by_factories(at: Laid, w: Any) -> Any:
    found = []
    for make in (
        lambda: torch.zeros_like(w, requires_grad=True),
        lambda: torch.ones_like(w, requires_grad=True),
        lambda: torch.full_like(w, 2.0, requires_grad=True),
        lambda: w.new_ones(4, 3, requires_grad=True),
        lambda: w.new_zeros((4, 3), requires_grad=True),
        lambda: w.new_full((4, 3), 0.5, requires_grad=True),
        lambda: torch.rand_like(w, requires_grad=True),
        lambda: torch.randn_like(w, requires_grad=True),
        lambda: torch.empty_like(w, requires_grad=True),
        lambda: w.new_empty((4, 3), requires_grad=True),
        lambda: w.detach().clone().requires_grad_(),
        lambda: nn.Parameter(w.detach()),
    ):
        leaf = make()
        with torch.no_grad():
            leaf.copy_(w)
        for step in (1, 2):
            loss_of(at, leaf, step).backward()
        found.append(leaf.grad)
    return found


@case
def recomputed(at: Laid, w: Any) -> Any:
    for reentrant in (False, True):
        y = checkpoint(lambda v: (v * w).sin(), w * 2, use_reentrant=reentrant)
        y.square().sum().backward()
    return w.grad


@case
def a_backward_that_raises_adds_nothing_later(at: Laid, w: Any) -> Any:
    first = at.leaf(randn(5, 4, seed=3), S(0))

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    handle = first.register_hook(fail)
    try:
        (first.sin() @ w).square().sum().backward()
    except ZeroDivisionError:
        handle.remove()
    w.grad = None
    loss_of(at, w).backward()
    return w.grad


@case
def gradients_in_half_precision(at: Laid, w: Any) -> Any:
    h = w.detach().to(torch.bfloat16).requires_grad_()
    x = at(randn(5, 4, seed=7).to(torch.bfloat16).round(), S(0))
    for loss in ((x @ h.sign()).sum() + h.sum(), (h * 2).sum()):
        loss.backward()
    return h.grad


def _no_sync(at: Laid, w: Any) -> Any:
    seen = []
    for step, synced in enumerate((False, False, True, False, True, True), 1):
        held = w.grad
        with consistent.no_sync() if not synced else torch.enable_grad():
            loss_of(at, w, step).backward()
        seen += [held is None or w.grad is held, value(w.grad)]
    return seen


@case
def no_sync_in_any_order(at: Laid, w: Any) -> Any:
    return _no_sync(at, w)


@case
def no_sync_under_create_graph(at: Laid, w: Any) -> Any:
    seen = []
    for step, synced in enumerate((False, True, False, True), 1):
        with consistent.no_sync() if not synced else torch.enable_grad():
            loss_of(at, w, step).backward(create_graph=True)
        (second,) = torch.autograd.grad(w.grad.square().sum(), w, retain_graph=True)
        seen += [value(w.grad), second]
    return seen


@case
def no_sync_keeps_aliases_right(at: Laid, w: Any) -> Any:
    """An alias may be left behind, but never reads as something that the gradient was not."""
    values, aliases = [], []
    for step, synced in enumerate((True, False, True), 1):
        with consistent.no_sync() if not synced else torch.enable_grad():
            loss_of(at, w, step).backward()
        values.append(value(w.grad))
        aliases.append(w.grad.detach())
    known = [any(bool((alias == v).all()) for v in values) for alias in aliases]
    return known, values


# -- sparse gradients ------------------------------------------------------------------------------


def _rows(at: Laid) -> Any:
    return at(torch.tensor([1, 3, 1, 0, 3]), S(0))


@case
def sparse_gradients(at: Laid, w: Any) -> Any:
    seen = []
    for step in (1, 2):
        held = w.grad
        (F.embedding(_rows(at), w, sparse=True) * step).sin().sum().backward()
        seen += [held is None or w.grad is held, w.grad.is_sparse, w.grad.to_dense()]
    return seen


@case
def sparse_then_dense_then_sparse(at: Laid, w: Any) -> Any:
    F.embedding(_rows(at), w, sparse=True).sin().sum().backward()
    loss_of(at, w).backward()
    g, first = w.grad, value(w.grad)
    F.embedding(_rows(at), w, sparse=True).sin().sum().backward()
    return first, w.grad is g, w.grad


@case
def sparse_without_sync(at: Laid, w: Any) -> Any:
    with consistent.no_sync():
        for _ in range(2):
            F.embedding(_rows(at), w, sparse=True).sin().sum().backward()
    first = w.grad.to_dense()
    F.embedding(_rows(at), w, sparse=True).cos().sum().backward()
    return first, w.grad.is_sparse, w.grad.to_dense()


HOW = {
    "buckets": (1 << 20, 1 << 20, 1 << 20, 1 << 60),
    "bucket of one": (1, 1, 1, 1 << 60),
    "at once": (1 << 20, 1 << 20, 1 << 20, 1),
}


def _differences(
    rank: int, cases: list[tuple[Callable[..., Any], str]], ranks: Any
) -> dict[str, str]:
    """What differs from plain torch, by the names of the cases, each run in a way of HOW."""
    found = {}
    for function, how in cases:
        with pytest.MonkeyPatch.context() as patch:
            names = (
                "FIRST_BUCKET_BYTES",
                "BUCKET_BYTES",
                "SHARED_BUCKET_BYTES",
                "SHARED_ALONE_BYTES",
            )
            for name, size in zip(names, HOW[how], strict=True):
                patch.setattr(buckets, name, size)
            patch.setattr(sys.modules[__name__], "LAYOUTS", distinct(LAYOUTS, ranks))
            try:
                compare(rank, in_every_layout, ranks, function)
            except Exception as error:  # noqa: BLE001  (all of them are listed together)
                found[f"{function.__name__}, {how}"] = f"{type(error).__name__}: {error}"
    return found


# Where a bucket ends does not depend on the axes that its gradients are summed over. The two ways
# to send each gradient by itself take turns, and so do the numbers of ranks.
ALONE = ("bucket of one", "at once")


@pytest.mark.parametrize("world", SIZES)
def test_equals_plain_torch(world: int) -> None:
    cases = [
        (function, how)
        for k, function in enumerate(CASES)
        for how in (HOW if ALL else ("buckets", ALONE[k // 2 % 2]))
        if world in in_turn(k + (how != "buckets"))
    ]
    assert pool(world).run(_differences, cases, GRIDS[world]) == [{}] * world


# Each axis of a grid sends what an axis alone does.
@pytest.mark.parametrize("world", SIZES if ALL else ON_ONE_AXIS)
def test_equals_plain_torch_where_ranks_share_no_memory(world: int) -> None:
    cases = [(function, "buckets") for function in CASES]
    assert pool(world).run(over_gloo, _differences, cases, GRIDS[world]) == [{}] * world


def _lie_as_leaves(rank: int) -> list[Any]:
    wrong = []
    for grid in ([[0], [1], [2]], [[0, 1, 2]]):
        p = consistent.placement("cpu", grid)
        for layout in LAYOUTS:
            if P not in layout:
                w = consistent.distribute(randn(4, 3), p, layout).requires_grad_()
                x = consistent.distribute(randn(5, 4), p, (S(0), B))
                (x @ w).square().sum().backward()
                wrong += [] if w.grad.sbp == layout else [(grid, layout, w.grad.sbp)]
    return wrong


@pytest.mark.parametrize("way", [(), (over_gloo,)], ids=["memory", "messages"])
def test_gradients_lie_as_their_leaves_along_axes_of_one_rank_too(way: tuple) -> None:
    assert pool(3).run(*way, _lie_as_leaves) == [[]] * 3
