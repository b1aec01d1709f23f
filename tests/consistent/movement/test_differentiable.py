"""Gradients of boxing: the dual way back, any number of times."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import forward_ad

from consistent.movement.boxed import box, box_several
from consistent.movement.differentiable import max_over, min_over, sum_over
from consistent.movement.world import my_coordinate
from consistent.spec import B, P, Placement, S, TensorSpec
from consistent.spec.tracer import Tracer
from tests.each_of import each_of
from tests.ranks import ON_ONE_AXIS, pool, simulate
from tests.reference import gather, in_grid_order, scatter, shard_at, whole_numbers
from tests.strategies import spec_pairs

ENTRIES = (B, P, S(0), S(1))
PAIRS = [(a, b) for a in ENTRIES for b in ENTRIES]


def three() -> Placement:
    return Placement("cpu", [0, 1, 2])


def of(sbp, shape=(7, 5), placement=None, dtype=torch.float64) -> TensorSpec:
    return TensorSpec.of(placement or three(), sbp, shape, dtype)


def to_partial_sum(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The sum of all logical elements, P over the whole grid."""
    whole = spec.with_sbp((B,) * spec.placement.ndim)
    z = box(local, spec, whole)
    at = my_coordinate(spec.placement)
    return z.sum() * float(at is not None and not any(at))


def times(local: torch.Tensor, spec: TensorSpec, power: int) -> tuple[torch.Tensor, TensorSpec]:
    """Elementwise power, which P does not pass through."""
    whole = spec.with_sbp((B,) * spec.placement.ndim)
    return box(local, spec, whole) ** power, whole


def first_gradient(rank: int, shards, src, dst) -> torch.Tensor:
    x = shard_at(shards, src, rank).requires_grad_()
    cubed, whole = times(box(x, src, dst), dst, 3)
    (grad,) = torch.autograd.grad(to_partial_sum(cubed, whole), x)
    return grad


def second_gradient(rank: int, shards, src, dst) -> torch.Tensor:
    x = shard_at(shards, src, rank).requires_grad_()
    cubed, whole = times(box(x, src, dst), dst, 3)
    (grad,) = torch.autograd.grad(to_partial_sum(cubed, whole), x, create_graph=True)
    squared, whole = times(grad, src.dual, 2)
    (again,) = torch.autograd.grad(to_partial_sum(squared, whole), x)
    return again


def third_gradient(rank: int, shards, src, dst) -> torch.Tensor:
    x = shard_at(shards, src, rank).requires_grad_()
    cubed, whole = times(box(x, src, dst), dst, 3)
    (grad,) = torch.autograd.grad(to_partial_sum(cubed, whole), x, create_graph=True)
    squared, whole = times(grad, src.dual, 2)
    (again,) = torch.autograd.grad(to_partial_sum(squared, whole), x, create_graph=True)
    (third,) = torch.autograd.grad(to_partial_sum(again, src.dual), x)
    return third


# x -> x^3 -> sum has gradient 3 x^2; squared and summed, 36 x^3; summed, 108 x^2.
GRADIENTS = [
    (first_gradient, lambda x: 3 * x**2),
    (second_gradient, lambda x: 36 * x**3),
    (third_gradient, lambda x: 108 * x**2),
]


def check_gradient(function, formula, src, dst) -> None:
    full = whole_numbers(src.shape)
    grads = simulate(function, src.placement.size, scatter(full, src), src, dst)
    assert torch.equal(gather(in_grid_order(grads, src), src.dual), formula(full))


@each_of(("function", "formula"), GRADIENTS)
@each_of(("src", "dst"), PAIRS)
def test_gradients_on_one_axis_are_those_of_plain_torch(src, dst, function, formula):
    check_gradient(function, formula, of(src), of(dst))


@settings(max_examples=120, deadline=None)
@given(spec_pairs(axes=(2, 3), partials=(P,)))
def test_gradient_has_the_dual_sbp(pair):
    check_gradient(*GRADIENTS[0], *pair)


@settings(max_examples=40, deadline=None)
@given(spec_pairs(axes=(2, 3), partials=(P,)))
def test_second_gradient_on_two_and_three_axes(pair):
    check_gradient(*GRADIENTS[1], *pair)


def all_gradients(rank: int, cases) -> list[torch.Tensor]:
    return [second_gradient(rank, scatter(whole_numbers(a.shape), a), a, b) for a, b in cases]


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_second_gradient_on_gloo_ranks(n):
    placement = Placement("cpu", range(n))
    cases = [(of(a, placement=placement), of(b, placement=placement)) for a, b in PAIRS]
    by_rank = pool(n).run(all_gradients, cases)
    for k, (src, _dst) in enumerate(cases):
        grads = [results[k] for results in by_rank]
        assert torch.equal(gather(grads, src.dual), 36 * whole_numbers(src.shape) ** 3)


# -- the way back ----------------------------------------------------------------------------------


def backward_moves(rank: int, src, dst, grad_sbp) -> list[str]:
    x = torch.zeros(
        src.local_shape(my_coordinate(src.placement)), dtype=src.dtype, requires_grad=True
    )
    y = box(x, src, dst, grad_sbp)
    seen: list[str] = []

    def note(a: TensorSpec, b: TensorSpec, moves) -> None:
        if my_coordinate(a.placement) == (0,):
            seen.extend(move.kind for move in moves)

    with Tracer(on_boxing_begin=note).tracing():
        y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    return seen


@pytest.mark.parametrize(
    ("src", "dst", "grad_sbp", "moves"),
    [
        (S(0), B, None, ["reduce_scatter"]),
        (S(0), B, (B,), ["all_reduce", "slice"]),
        (B, S(0), None, ["pad"]),
        (B, B, None, []),
        (B, B, (B,), ["all_reduce", "keep_first"]),
        (P, B, None, ["all_reduce"]),
        (P, B, (S(0),), ["reduce_scatter", "all_gather"]),
    ],
    ids=str,
)
def test_gradient_stops_over_at_grad_sbp(src, dst, grad_sbp, moves):
    one = Placement("cpu", [0])
    assert simulate(
        backward_moves, 1, of(src, placement=one), of(dst, placement=one), grad_sbp
    ) == [moves]


def same_spec(rank: int) -> tuple[bool, bool]:
    x = torch.zeros(7, 5, dtype=torch.float64, requires_grad=True)
    y = box(x, of(B), of(B), (B,))
    return box(x, of(B), of(B)) is x, y.data_ptr() == x.data_ptr()


def test_src_to_itself_is_the_input_without_grad_sbp_and_a_copy_with():
    assert simulate(same_spec, 3) == [(True, False)] * 3


def untracked(rank: int) -> list[bool]:
    x = torch.ones(7, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        quiet = box(x, of(B), of(S(0)))
    return [
        quiet.requires_grad,
        box(x.detach(), of(B), of(S(0))).requires_grad,
        box(x, of(B), of(S(0))).requires_grad,
    ]


def test_box_tracks_only_where_autograd_does():
    assert simulate(untracked, 3) == [[False, False, True]] * 3


def outside(rank: int) -> tuple:
    placement = Placement("cpu", [1, 2])
    src, dst = of(S(0), placement=placement), of(B, placement=placement)
    at = my_coordinate(placement)
    x = torch.ones(
        src.local_shape(at), dtype=src.dtype, device="cpu" if at else "meta", requires_grad=True
    )
    y = box(x, src, dst)
    y.sum().backward()
    assert x.grad is not None
    return x.grad.device.type, tuple(x.grad.shape), tuple(y.shape)


def test_rank_outside_keeps_the_same_graph_on_meta():
    assert simulate(outside, 3) == [
        ("meta", (4, 5), (7, 5)),
        ("cpu", (4, 5), (7, 5)),
        ("cpu", (3, 5), (7, 5)),
    ]


def tangents(rank: int, shards, src, dst) -> torch.Tensor:
    x = forward_ad.make_dual(shard_at(shards, src, rank), shard_at(shards, src, rank) * 2)
    out = forward_ad.unpack_dual(box(x, src, dst)).tangent
    assert out is not None
    return out.clone()


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
def test_forward_mode_boxes_the_tangent(src, dst):
    full = whole_numbers((7, 5))
    with forward_ad.dual_level():  # one level for all threads
        out = simulate(tangents, 3, scatter(full, of(src)), of(src), of(dst))
    assert torch.equal(gather(out, of(dst)), 2 * full)


def tangents_of_some(rank: int, shards, src, dst) -> torch.Tensor:
    frozen = shard_at(shards, src, rank)
    x, learned = forward_ad.make_dual(frozen.clone(), 2 * frozen), frozen.clone().requires_grad_()
    made = box_several([x, frozen, learned], [(src, dst)] * 3)
    moved, none, zero = (forward_ad.unpack_dual(out).tangent for out in made)
    assert none is None and not made[1].requires_grad and made[2].requires_grad
    assert moved is not None and zero is None
    return moved.clone()


@pytest.mark.parametrize(("src", "dst"), [(S(0), B), (P, S(1)), (P, B)], ids=str)
def test_forward_mode_boxes_the_tangents_that_there_are(src, dst):
    full = whole_numbers((7, 5))
    with forward_ad.dual_level():  # one level for all threads
        out = simulate(tangents_of_some, 3, scatter(full, of(src)), of(src), of(dst))
    assert torch.equal(gather(out, of(dst)), 2 * full)


def under_func(rank: int) -> torch.Tensor:
    return torch.func.grad(lambda x: box(x, of(P), of(B)).sum())(
        torch.ones(7, 5, dtype=torch.float64)
    )


def test_torch_func_raises_and_does_not_answer_for_one_shard():
    with pytest.raises(RuntimeError, match="torch.func transform"):
        simulate(under_func, 3)


# -- a subclass whose shape is not its own ---------------------------------------------------------


class Liar(torch.Tensor):
    """Says the logical shape, and lets nobody through the hook."""

    @property
    def shape(self):  # type: ignore[override]
        return torch.Size([1000, 1000])

    def size(self, *_):  # type: ignore[override]
        return self.shape

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} went through the hook")


def of_liar(rank: int, shards, src, dst) -> tuple:
    leaf = shard_at(shards, src, rank).requires_grad_()
    x = leaf * 1
    x.__class__ = Liar
    y = box(x, src, dst)
    z = box(y, dst, dst.with_sbp((B,)))
    (grad,) = torch.autograd.grad(z.sum(), leaf)
    return type(y), y.detach(), grad


@pytest.mark.parametrize(
    ("src", "dst"), [pair for pair in PAIRS if pair[0] is not pair[1]], ids=str
)
def test_shapes_come_from_specs_and_results_are_plain(src, dst):
    full = whole_numbers((7, 5))
    results = simulate(of_liar, 3, scatter(full, of(src)), of(src), of(dst))
    assert {kind for kind, _, _ in results} == {torch.Tensor}
    assert torch.equal(gather([y for _, y, _ in results], of(dst)), full)
    # Each rank starts from ones at a B tensor, so the gradient is 3 in all.
    assert torch.equal(
        gather([g for _, _, g in results], of(src).dual), torch.full((7, 5), 3.0).double()
    )


def guarded(rank: int) -> bool:
    x = torch.ones(7, 5, dtype=torch.float64, requires_grad=True)
    return box(x, of(P), of(B)).requires_grad and sum_over(x, three(), (0,)).requires_grad


def test_a_guard_on_users_functions_does_not_reach_boxing(monkeypatch):
    def refuse(*_args):
        raise AssertionError("guarded")

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(refuse))
    assert simulate(guarded, 3) == [True] * 3


# -- reductions for local forms --------------------------------------------------------------------


def reduce_all(rank: int, function, placement, axes) -> list[float]:
    return function(torch.tensor([float(2**rank), -float(rank)]), placement, axes).tolist()


@pytest.mark.parametrize(
    ("axes", "sums"),
    [((0,), [5, 10, 5, 10]), ((1,), [3, 3, 12, 12]), ((0, 1), [15] * 4), ((), [1, 2, 4, 8])],
    ids=str,
)
def test_sum_over_axes(axes, sums):
    grid = Placement("cpu", [[0, 1], [2, 3]])
    assert [x for x, _ in simulate(reduce_all, 4, sum_over, grid, axes)] == sums


def test_max_and_min_over_axes():
    grid = Placement("cpu", [[0, 1], [2, 3]])
    assert simulate(reduce_all, 4, max_over, grid, (1,)) == [[2, 0], [2, 0], [8, -2], [8, -2]]
    assert simulate(reduce_all, 4, min_over, grid, (0, 1)) == [[1, -3]] * 4


def sum_gradients(rank: int) -> list[float]:
    x = torch.tensor(float(rank + 1), dtype=torch.float64, requires_grad=True)
    y = sum_over(x, three(), (0,)) ** 4  # 6^4 on every rank; the loss is the sum of them all
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return [first.item(), second.item()]


def test_sum_over_is_its_own_backward():
    # With s = sum x = 6: 3 s^4 has derivative 12 s^3; the sum of that over ranks, 36 s^3, has 108
    # s^2.
    assert simulate(sum_gradients, 3) == [[2592.0, 3888.0]] * 3


def sum_outside(rank: int) -> tuple[bool, ...]:
    x = torch.ones(3, device="meta") if rank == 0 else torch.ones(3)
    placement = Placement("cpu", [1, 2])
    return tuple(f(x, placement, (0,)) is x for f in (sum_over, max_over, min_over))


def test_rank_outside_gets_its_meta_tensor_back():
    assert simulate(sum_outside, 3) == [(True,) * 3, (False,) * 3, (False,) * 3]


def write_sum(rank: int, axes) -> float:
    x = torch.ones(3)
    sum_over(x, three(), axes).fill_(7)
    return x[0].item()


@pytest.mark.parametrize("axes", [(), (0,)], ids=str)
def test_sum_is_a_new_tensor(axes):
    assert simulate(write_sum, 3, axes) == [1.0] * 3
