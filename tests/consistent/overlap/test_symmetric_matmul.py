"""Which products torch's fused ops can do, and what is made of their results.

The ops themselves need several GPUs; here others of the same signature stand in for them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent.overlap import chunked_matmul, symmetric_matmul
from consistent.overlap.symmetric_matmul import fused_group_and_dim
from consistent.spec import B, P, Placement, S, TensorSpec
from consistent.tensor.making.create import distribute
from mirrored.transports.default import current
from tests.ranks import pool, simulate


def _answers(monkeypatch: pytest.MonkeyPatch, name: str | None, *ends: Any, **more: Any) -> Any:
    monkeypatch.setattr(symmetric_matmul, "group_name", lambda ranks, kind: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    grid = more.get("grid", (2,))
    ranks = torch.arange(torch.Size(grid).numel()).view(grid).numpy()
    placement = Placement(more.get("kind", "cuda"), ranks)
    shape, dtype = more.get("shape", (4, 2048, 4096)), more.get("dtype", torch.bfloat16)
    src, dst = (TensorSpec.of(placement, end, shape, dtype) for end in ends)
    found = simulate(lambda rank: fused_group_and_dim(src, dst), 2)
    assert found[0] == found[1]
    return found[0]


def test_a_gather_and_a_scatter_of_equal_pieces_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answers(monkeypatch, "g", (S(0),), (B,)) == ("g", 0)
    assert _answers(monkeypatch, "g", (S(1),), (B,)) == ("g", 1)
    assert _answers(monkeypatch, "g", (P,), (S(1),)) == ("g", 1)
    assert _answers(monkeypatch, "g", (P, B), (S(0), B), grid=(2, 1)) == ("g", 0)


@pytest.mark.parametrize(
    ("ends", "more"),
    [
        (((P,), (B,)), {}),
        (((S(2),), (B,)), {}),
        (((S(0),), (B,)), {"shape": (5, 2048, 4096)}),
        (((S(0),), (B,)), {"shape": (4, 0, 4096)}),
        (((S(0),), (B,)), {"shape": (4, 6, 8)}),
        (((S(0),), (B,)), {"dtype": torch.float64}),
        (((S(0),), (B,)), {"kind": "cpu"}),
        (((S(0),), (B,)), {"grid": (1,)}),
        (((S(0), B), (B, B)), {"grid": (2, 2)}),
    ],
)
def test_all_else_goes_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, ends: Any, more: dict[str, Any]
) -> None:
    assert _answers(monkeypatch, "g", *ends, **more) is None


def test_without_symmetric_memory_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answers(monkeypatch, None, (S(0),), (B,)) is None


def _gather(x: torch.Tensor, ws: list, dim: int, name: str, *, return_A: bool = True) -> Any:  # noqa: N803
    boxed = current().all_gather_into_tensor(x, dim, [x.shape[dim]] * 2, (0, 1))
    return boxed, [boxed @ w for w in ws]


def _scatter(x: torch.Tensor, w: torch.Tensor, op: str, dim: int, name: str) -> torch.Tensor:
    assert (op, name) == ("sum", "g")
    return current().reduce_scatter(x @ w, dim, [x.shape[dim] // 2] * 2, (0, 1))


def _split_dim(src: TensorSpec, dst: TensorSpec) -> tuple[str, int] | None:
    split = [e.dim for e in (*src.sbp, *dst.sbp) if e.is_split]
    return ("g", split[0]) if split else None


def _with_stand_ins(rank: int, dim: int) -> int:
    from torch.distributed import _symmetric_memory  # noqa: F401  (defines the ops)

    calls: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *args, **kwargs: calls.append("") or function(*args, **kwargs)

    asked, chunked_matmul.fused_group_and_dim = chunked_matmul.fused_group_and_dim, _split_dim
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", counted(_gather), "CPU")
    library.impl("fused_matmul_reduce_scatter", counted(_scatter), "CPU")
    try:
        random = torch.Generator().manual_seed(0)
        shapes = ((4, 6, 4), (4, 8), (8,))
        x, w, b = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        wanted = torch.relu(x @ w + b)
        grads = torch.autograd.grad(wanted.sin().sum(), leaves)
        for gather in (True, False):
            sbps = (S(dim), S(1), B) if gather else (S(2), S(0), B)
            given = [
                distribute(t.detach(), Placement("cpu", range(2)), (s,)).requires_grad_()
                for t, s in zip(leaves, sbps, strict=True)
            ]
            call: Any = consistent.all_gather_matmul
            if not gather:
                call = consistent.matmul_reduce_scatter
            y = call(*given, activation="relu", **({} if gather else {"dim": dim}))
            torch.testing.assert_close(y.full(), wanted)
            made = torch.autograd.grad(y.sin().sum(), given)
            for ours, theirs in zip(made, grads, strict=True):
                torch.testing.assert_close(ours.full(), theirs)
    finally:
        library._destroy()
        chunked_matmul.fused_group_and_dim = asked
    return len(calls)


@pytest.mark.parametrize("dim", [0, 1])
def test_values_and_gradients_by_ops_of_their_signature(dim: int) -> None:
    assert pool(2).run(_with_stand_ins, dim) == [4, 4]  # each way once forward, once backward
