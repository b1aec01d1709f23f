"""Sparse matrices as operands, whole or split by rows or columns: values and gradients are those of
one process, in every layout of the dense operand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import consistent
from consistent import B, S
from mirrored import counting
from tests.ranks import on_ranks

ROWS, INNER, WIDTH = 7, 5, 3
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
# Each takes the sparse matrix, a dense one [INNER, WIDTH] and one [ROWS, WIDTH] to add.
CALLS: dict[str, Callable[..., Any]] = {
    "mm": lambda a, x, c: torch.mm(a, x),
    "@": lambda a, x, c: a @ x,
    "sparse.mm": lambda a, x, c: torch.sparse.mm(a, x),
    "addmm": lambda a, x, c: torch.addmm(c, a, x),
    "sparse.addmm": lambda a, x, c: torch.sparse.addmm(c, a, x),
    "mv": lambda a, x, c: torch.mv(a, x[:, 0]),
    "dense @ sparse": lambda a, x, c: x.t() @ a.t(),
    "to_dense": lambda a, x, c: a.to_dense() @ x,
    "scaled": lambda a, x, c: (a * 2) @ x,
    "mean of products": lambda a, x, c: torch.sparse.mm(a, x, "mean"),
    "largest product": lambda a, x, c: torch.sparse.mm(a, x, "amax"),
    "sampled": lambda a, x, c: torch.sparse.sampled_addmm(a, c, x.t()).to_dense(),
}
CSR_ALONE = ("mean of products", "largest product", "sampled")


def case(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    dense = [
        torch.rand(shape, dtype=torch.float64, generator=draw)
        for shape in ((ROWS, INNER), (INNER, WIDTH), (ROWS, WIDTH))
    ]
    dense[0][dense[0] < 0.5] = 0
    dense[0][1] = 0  # a row without entries
    return KINDS[kind](dense[0]), dense[1], dense[2]


def found(call: str, a: Any, x: Any, c: Any) -> list[Tensor]:
    x, c = x.detach().clone().requires_grad_(), c.detach().clone().requires_grad_()
    y = CALLS[call](a, x, c)
    (y * y).sum().backward()
    grads = [leaf.grad for leaf in (x, c) if leaf.grad is not None]
    return [t.full() if isinstance(t, consistent.GlobalTensor) else t for t in (y, *grads)]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3)
def test_products_are_those_of_one_process(rank: int, kind: str) -> None:
    at = consistent.Placement.all("cpu")
    sparse, dense, more = case(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that sparse layouts are in beta
        for call in CALLS:
            if call in CSR_ALONE and kind != "csr":
                continue
            wanted = found(call, sparse, dense, more)
            for of_sparse in (None, B, S(0), S(1)):
                a = sparse if of_sparse is None else consistent.distribute(sparse, at, of_sparse)
                for sbp in (B, S(0), S(1)):
                    x, c = (consistent.distribute(t, at, sbp) for t in (dense, more))
                    got = found(call, a, x, c)
                    assert len(got) == len(wanted), (call, of_sparse, sbp)
                    for g, w in zip(got, wanted):
                        torch.testing.assert_close(g, w, msg=f"{call} {of_sparse} {sbp}")


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3)
def test_rows_are_held_by_their_rank_and_sent_only_where_wanted(rank: int, kind: str) -> None:
    at = consistent.Placement.all("cpu")
    sparse, dense, _ = case(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = consistent.distribute(sparse, at, S(0))
        assert a.to_local().layout is a.full().layout is sparse.layout
        assert a.to_local().shape[0] < ROWS
        assert torch.equal(a.full().to_dense(), sparse.to_dense())
        whole = consistent.distribute(dense, at, B)
        sparse @ whole, a @ whole  # plans are made once
        with counting() as calls:
            sparse @ whole, a @ whole
    assert not calls.calls
