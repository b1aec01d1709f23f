"""Reading a value as numpy: what is written into the array reaches the tensor, or raises. A sparse
matrix is read whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import consistent
from consistent import B, P, Placement, S
from tests.ranks import on_ranks

READERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "forced": lambda x: x.numpy(force=True),
    "__array__": lambda x: x.__array__(),
    "asarray": np.asarray,
    "unbound": torch.Tensor.numpy,
}


@pytest.mark.parametrize("ranks_of_it", [[0, 1], [1]])
@pytest.mark.parametrize("sbp", [S(0), S(1), B, P, P(max)], ids=str)
@on_ranks(2)
def test_a_write_into_the_array_reaches_the_tensor_or_raises(
    rank: int, sbp: Any, ranks_of_it: list[int]
) -> None:
    for read in READERS.values():
        x = consistent.distribute(torch.ones(4, 3), Placement("cpu", ranks_of_it), sbp)
        array = read(x)
        assert array.tolist() == np.ones((4, 3)).tolist()
        if array.flags.writeable:
            array[0] = 7
            assert x.to_local()[0].tolist() == [7, 7, 7]
        else:
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7
        assert sbp is not B or len(ranks_of_it) < 2 or array.flags.writeable


@on_ranks(2)
def test_a_copy_that_numpy_is_asked_for_is_the_callers_own(rank: int) -> None:
    for sbp in (S(0), B, P):
        x = consistent.distribute(torch.ones(4, 3), Placement("cpu", [0, 1]), sbp)
        for copied in (np.array(x), np.array(x, dtype=np.float64), x.numpy().copy()):
            copied[0] = 7
            assert x.full().tolist() == np.ones((4, 3)).tolist()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("entry", [B, S(0)], ids=str)
@on_ranks(2, 3)
def test_a_csr_matrix_is_an_operand_and_is_read_whole(rank: int, entry: Any) -> None:
    p = consistent.placement("cpu", list(range(torch.distributed.get_world_size())))
    mask = torch.eye(6, dtype=torch.float64).roll(1, 0) + torch.eye(6, dtype=torch.float64)
    x, y = (torch.arange(24, dtype=torch.float64).sin().view(s) for s in ((6, 4), (4, 6)))
    for given in (mask.to_sparse_csr(), consistent.distribute(mask.to_sparse_csr(), p, B)):
        leaf, laid = x.clone().requires_grad_(), consistent.distribute(x, p, entry)
        laid = laid.requires_grad_()
        want = torch.sparse.sampled_addmm(mask.to_sparse_csr(), leaf, y)
        got = torch.sparse.sampled_addmm(given, laid, consistent.distribute(y, p, B))
        assert got.full().layout is torch.sparse_csr
        torch.testing.assert_close(got.full().to_dense(), want.to_dense())
        for reduce in ("sum", "mean", "amax", "amin"):
            reduced = torch.sparse.mm(given, consistent.distribute(x, p, entry), reduce)
            torch.testing.assert_close(
                reduced.full(), torch.sparse.mm(mask.to_sparse_csr(), x, reduce)
            )
        want.to_dense().square().sum().backward()
        got.to_dense().square().sum().backward()
        torch.testing.assert_close(laid.grad.full(), leaf.grad)
