"""Products in chunks give the values and gradients of torch, whatever the number of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent.overlap import chunked_matmul
from consistent.spec import B, NdSbp, P, Placement, S, TensorSpec
from consistent.tensor.making.create import distribute, from_local
from mirrored.transports.counting import counting
from tests.ranks import ON_ONE_AXIS, on_ranks, pool

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
SPLIT = {
    "all_gather_matmul": (S(0), S(1)),
    "matmul_reduce_scatter": (S(-1), S(0)),
    "matmul_all_reduce": (S(-1), S(0)),
}


def _numbers(*shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(tuple(shape), dtype=dtype, generator=random) for shape in shapes]


def _program(product: Callable[..., Any], tensors: list[Any], twice: bool = False) -> list[Any]:
    """Value, gradients, and those of the gradients' squares."""
    y = product(*tensors)
    first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=twice)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors) if twice else ()
    return [y, *first, *second]


def _plain(activation: str) -> Callable[..., torch.Tensor]:
    def product(x: Any, w: Any, *bias: Any) -> Any:
        return ACTIVATIONS[activation](torch.add(x @ w, bias[0]) if bias else x @ w)

    return product


def _compare(
    name: str,
    tensors: list[torch.Tensor],
    sbps: Sequence[NdSbp],
    placement: Placement,
    chunks: int | None,
    activation: str = "none",
    twice: bool = False,
    **more: Any,
) -> Any:
    """The result, after a comparison of all with torch."""

    def ours(*given: Any) -> Any:
        return getattr(consistent, name)(*given, activation=activation, chunks=chunks, **more)

    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in tensors]
        wanted = _program(_plain(activation), leaves, twice)
        given = [
            distribute(t, placement, sbp).requires_grad_()
            for t, sbp in zip(tensors, sbps, strict=True)
        ]
        made = _program(ours, given, twice)
    for a, e in zip(made, wanted, strict=True):
        torch.testing.assert_close(a.detach().full(), e.detach())
    return made[0]


def _in_chunks(rank: int, ranks: int, rows: int) -> int:
    placement, tensors = Placement("cpu", range(ranks)), _numbers((rows, 5), (5, 4))
    # The first message of a process starts the thread that answers questions about hangs.
    distribute(tensors[0], placement, S(0)).full()
    before = threading.active_count()
    for name, (x, w) in SPLIT.items():
        for chunks in range(1, 6):
            _compare(name, tensors, [(x,), (w,)], placement, chunks)
    return threading.active_count() - before


@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12])
def test_any_number_of_chunks_of_any_number_of_rows(ranks: int, rows: int) -> None:
    assert pool(ranks).run(_in_chunks, ranks, rows) == [0] * ranks


@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_ranks(3)
def test_bias_and_activation_differentiate_twice(rank: int, activation: str) -> None:
    placement, tensors = Placement("cpu", range(3)), _numbers((7, 5), (5, 4), (4,))
    for name, (x, w) in SPLIT.items():
        for bias in (B, S(0)):
            _compare(name, tensors, [(x,), (w,), (bias,)], placement, 3, activation, twice=True)


def _three_dims(rank: int) -> list[NdSbp]:
    placement, tensors = Placement("cpu", range(2)), _numbers((3, 5, 4), (4, 6), (6,))
    found = []
    for dim in (0, 1, 2):
        made = _compare(
            "matmul_reduce_scatter", tensors, [(S(2),), (S(0),), (B,)], placement, 2, "gelu",
            dim=dim,
        )  # fmt: skip
        found.append(made.sbp)
        made = _compare("all_gather_matmul", tensors, [(S(dim),), (S(1),), (B,)], placement, 2)
        assert made.sbp == (S(2),)
    return found


def test_any_dim_is_scattered_and_gathered() -> None:
    assert pool(2).run(_three_dims) == [[(S(0),), (S(1),), (S(2),)]] * 2


def _on_a_grid(rank: int) -> list[NdSbp]:
    placement = Placement("cpu", torch.arange(4).view(2, 2).numpy())
    tensors, found = _numbers((9, 5), (5, 7), (7,)), []
    for name, x, w in [
        ("matmul_all_reduce", (S(0), S(1)), (B, S(0))),
        ("matmul_reduce_scatter", (S(0), S(1)), (B, S(0))),
        ("matmul_reduce_scatter", (S(1), S(1)), (S(0), S(0))),
        ("matmul_all_reduce", (B, S(1)), (S(1), S(0))),
        ("all_gather_matmul", (S(0), S(0)), (B, S(1))),
        ("all_gather_matmul", (S(0), S(0)), (S(1), B)),
    ]:
        made = _compare(name, tensors[:2], [x, w], placement, 3, "silu")
        found.append(made.sbp)
        if P not in made.sbp:
            _compare(name, tensors, [x, w, (B, B)], placement, 2)
    return found


def test_other_axes_may_split_what_they_like() -> None:
    wanted = [(S(0), B), (S(0), S(0)), (S(0), S(0)), (S(1), B), (S(0), S(1)), (S(1), S(0))]
    assert pool(4).run(_on_a_grid) == [wanted] * 4


def _two_layers(rank: int, checked: bool) -> int:
    placement = Placement("cpu", torch.arange(4).view(2, 2).numpy())
    tensors = _numbers((9, 5), (5, 7), (7,), (7, 3), (3,))
    leaves = [t.clone().requires_grad_() for t in tensors]
    hidden = F.gelu(leaves[0] @ leaves[1] + leaves[2])
    (hidden @ leaves[3] + leaves[4]).sin().sum().backward()
    sbps = (S(0), S(0)), (B, S(1)), (B, S(0)), (B, S(0)), (B, B)
    given = [
        distribute(t, placement, s).requires_grad_() for t, s in zip(tensors, sbps, strict=True)
    ]
    with consistent.check_mode() if checked else nullcontext(), consistent.report() as seen:
        x, w, b, w2, b2 = given
        hidden = consistent.all_gather_matmul(x, w, b, activation="gelu", chunks=3)
        y = consistent.matmul_reduce_scatter(hidden, w2, b2, chunks=2)
        y.sin().sum().backward()
    assert y.sbp == (S(0), S(0))
    for ours, theirs in zip(given, leaves, strict=True):
        torch.testing.assert_close(ours.grad.full(), theirs.grad)
    return len(str(seen))


@pytest.mark.parametrize("checked", [False, True])
def test_two_layers_learn_on_a_grid_with_gradients_summed_meanwhile(checked: bool) -> None:
    assert all(pool(4).run(_two_layers, checked))


@on_ranks(2)
def test_bfloat16_is_as_near_as_its_rounding(rank: int) -> None:
    placement, tensors = Placement("cpu", range(2)), _numbers((33, 16), (16, 24), (24,))
    for name, (x, w) in SPLIT.items():
        short = [t.bfloat16() for t in tensors]
        given = [
            distribute(t, placement, (s,)).requires_grad_()
            for t, s in zip(short, (x, w, B), strict=True)
        ]
        y = getattr(consistent, name)(*given, activation="gelu", chunks=3)
        y.sum().backward()
        wide = [t.double().requires_grad_() for t in short]
        wanted = F.gelu(wide[0] @ wide[1] + wide[2])
        wanted.sum().backward()
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.full().double(), wanted, rtol=0.03, atol=0.06)
        for ours, theirs in zip(given, wide, strict=True):
            grad = ours.grad.full().double()
            torch.testing.assert_close(grad, theirs.grad, rtol=0.05, atol=0.3)


def _autocast(rank: int) -> list[torch.dtype]:
    placement, found = Placement("cpu", range(2)), []
    tensors = _numbers((5, 4), (4, 6), (6,), dtype=torch.float32)
    for name, (x, w) in SPLIT.items():
        for chunks in (1, 2):
            given = [
                distribute(t, placement, (s,)).requires_grad_()
                for t, s in zip(tensors, (x, w, B), strict=True)
            ]
            with torch.autocast("cpu", torch.bfloat16):
                y = getattr(consistent, name)(*given, chunks=chunks)
            y.float().sum().backward()
            found += [y.dtype, y.to_local().dtype, given[1].grad.dtype]
    return found


def test_autocast_multiplies_in_its_dtype() -> None:
    wanted = [torch.bfloat16, torch.bfloat16, torch.float32] * 6
    assert pool(2).run(_autocast) == [wanted] * 2


def _sent(rank: int) -> list[tuple[int, int]]:
    placement, found = Placement("cpu", range(2)), []
    x, w = _numbers((9, 4), (4, 6))
    for name, (at_x, at_w) in SPLIT.items():
        given = distribute(x, placement, (at_x,)), distribute(w, placement, (at_w,))
        for chunks in (1, 4):
            with counting() as log:
                getattr(consistent, name)(*given, chunks=chunks)
            found.append((log.bytes, len(log.calls)))
    return found


def test_chunks_send_the_bytes_of_the_whole() -> None:
    gathered, scattered, reduced = 8 * 4, 8 * 6, 8 * 6 * 9
    for rank, found in enumerate(pool(2).run(_sent)):
        assert found == [
            *((gathered * (5, 4)[rank], calls) for calls in (1, 4)),
            *((scattered * (4, 5)[rank], calls) for calls in (1, 4)),
            *((reduced, calls) for calls in (1, 4)),
        ]


@on_ranks(2)
def test_it_works_where_no_gradient_is_asked_for(rank: int) -> None:
    placement, (x, w) = Placement("cpu", range(2)), _numbers((5, 4), (4, 6))
    for mode in (torch.no_grad, torch.inference_mode):
        for name, (at_x, at_w) in SPLIT.items():
            with mode():
                given = distribute(x, placement, (at_x,)), distribute(w, placement, (at_w,))
                y = getattr(consistent, name)(*given, chunks=2, activation="relu").full()
            torch.testing.assert_close(y, torch.relu(x @ w))


@on_ranks(2)
def test_a_gradient_may_be_asked_of_one_alone(rank: int) -> None:
    placement, tensors = Placement("cpu", range(2)), _numbers((5, 4), (4, 6), (6,))
    for name, (x, w) in SPLIT.items():
        for asked in range(3):
            leaves = [t.clone().requires_grad_(i == asked) for i, t in enumerate(tensors)]
            F.silu(leaves[0] @ leaves[1] + leaves[2]).sum().backward()
            given = [
                distribute(t, placement, (s,)).requires_grad_(i == asked)
                for i, (t, s) in enumerate(zip(tensors, (x, w, B), strict=True))
            ]
            getattr(consistent, name)(*given, activation="silu", chunks=2).sum().backward()
            for ours, theirs in zip(given, leaves, strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    torch.testing.assert_close(ours.grad.full(), theirs.grad)


def _outside(rank: int) -> torch.Tensor:
    placement, (x, w) = Placement("cpu", range(2)), _numbers((5, 4), (4, 6))
    given = [distribute(t, placement, (s,)).requires_grad_() for t, s in ((x, S(1)), (w, S(0)))]
    y = consistent.matmul_all_reduce(given[0], given[1], activation="gelu", chunks=2)
    y.sum().backward()
    return given[1].grad.full()


def test_ranks_outside_the_placement_follow() -> None:
    x, w = _numbers((5, 4), (4, 6))
    w.requires_grad_()
    F.gelu(x @ w).sum().backward()
    for found in pool(3).run(_outside):
        torch.testing.assert_close(found, w.grad)


def _failing(rank: int) -> float:
    placement, (x, w) = Placement("cpu", range(2)), _numbers((6, 4), (4, 6))
    given = distribute(x, placement, (S(1),)), distribute(w, placement, (S(0),))
    before, run = threading.active_count(), chunked_matmul.run_within
    calls: list[int] = []

    def fail_third(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the line is down")
        return run(*args)

    chunked_matmul.run_within = fail_third
    try:
        with pytest.raises(OSError, match="the line is down"):
            consistent.matmul_all_reduce(*given, chunks=5)
    finally:
        chunked_matmul.run_within = run
    assert (len(calls), threading.active_count()) == (3, before)
    return float(consistent.matmul_all_reduce(*given, chunks=5).sum())


def test_a_failure_reaches_the_caller_and_the_next_call_works() -> None:
    x, w = _numbers((6, 4), (4, 6))
    assert pool(2).run(_failing) == [pytest.approx((x @ w).sum().item())] * 2


def _chosen(rank: int, spare: bool) -> list[int]:
    placement, found = Placement("cpu", range(2)), []
    asked = chunked_matmul.has_spare_cores
    chunked_matmul.has_spare_cores = lambda ranks: spare
    try:
        for rows in (8, 1 << 21):
            src, dst = (TensorSpec.of(placement, (e,), (rows, 1), torch.float32) for e in (P, B))
            found.append(chunked_matmul.chunk_count(src, dst))
        x = from_local(torch.ones(3, 1), placement, (S(1),), shape=(3, 2))
        w = from_local(torch.ones(1, 2), placement, (S(0),), shape=(2, 2))
        assert consistent.matmul_all_reduce(x, w).full().tolist() == [[2.0, 2.0]] * 3
    finally:
        chunked_matmul.has_spare_cores = asked
    return found


def test_it_is_cut_where_cores_are_idle_and_the_product_large() -> None:
    assert pool(2).run(_chosen, True) == [[1, 3]] * 2
    assert pool(2).run(_chosen, False) == [[1, 1]] * 2
