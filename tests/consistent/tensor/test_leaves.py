"""Leaves that torch's factories make of a global tensor: their gradients land as the leaves lie."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from consistent import B, GlobalTensor, P, Placement, S
from tests.ranks import in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, randn

# Every function of torch that may be given a tensor and makes a leaf.
FACTORIES: dict[str, Callable[[Any], Any]] = {
    "arange": lambda x: torch.arange(x[0, 0].abs() + 3, requires_grad=True),
    "empty_like": lambda x: torch.empty_like(x, requires_grad=True),
    "full": lambda x: torch.full((4, 5), x[0, 0], requires_grad=True),
    "full_like": lambda x: torch.full_like(x, 2.0, requires_grad=True),
    "linspace": lambda x: torch.linspace(x[0, 0], x[1, 1], 5, requires_grad=True),
    "logspace": lambda x: torch.logspace(x[0, 0], x[1, 1], 5, requires_grad=True),
    "new_empty": lambda x: x.new_empty(3, 4, requires_grad=True),
    "new_empty_strided": lambda x: x.new_empty_strided((3, 4), (4, 1), requires_grad=True),
    "new_full": lambda x: x.new_full((3, 4), 2.0, requires_grad=True),
    "new_ones": lambda x: x.new_ones(3, 4, requires_grad=True),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0], requires_grad=True),
    "new_zeros": lambda x: x.new_zeros((3, 4), requires_grad=True),
    "ones_like": lambda x: torch.ones_like(x, requires_grad=True),
    "rand_like": lambda x: torch.rand_like(x, requires_grad=True),
    "randint_like": lambda x: torch.randint_like(x, 5, requires_grad=True),
    "randn_like": lambda x: torch.randn_like(x, requires_grad=True),
    "scalar_tensor": lambda x: torch.scalar_tensor(x[0, 0], requires_grad=True),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
}
# They are given sizes, numbers, buffers and files, or refuse a global tensor (`asarray`, `tensor`),
# or make what is not dense.
OTHERS = set(
    """_cudnn_init_dropout_state _dtensor__new__ _efficientzerotensor _empty_affine_quantized
    _empty_per_channel_affine_quantized _make_dep_token _make_wrapper_subclass asarray
    bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye
    from_file frombuffer hamming_window hann_window kaiser_window normal ones rand randint randn
    randperm range sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
    sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros""".split()
)


def test_each_factory_of_torch_is_known() -> None:
    stubs = Path(torch.__file__).parent / "_C"
    functions = (stubs / "_VariableFunctions.pyi").read_text()
    methods = (stubs / "__init__.pyi").read_text().partition("class TensorBase")[2]
    takes = re.compile(r"def (\w+)\([^)]*\brequires_grad:")
    assert {*takes.findall(functions), *takes.findall(methods)} <= {*FACTORIES, *OTHERS}


def _lands(rank: int, name: str, ranks: Any) -> None:
    at, axes = Laid(Placement("cpu", ranks)), len(torch.tensor(ranks).shape)
    for entries in ((S(0), B), (S(1), S(0)), (B, B), (P, B), (B, P)):
        for _ in range(2):  # planned, and from the plan
            x = at(randn(5, 4), *entries)
            leaf = FACTORIES[name](x)
            assert leaf.is_leaf and leaf.requires_grad and leaf.grad is None
            weights = randn(*leaf.shape, seed=1)
            for _ in range(2):
                ((leaf * weights).sum() + (x * 0).sum()).backward()
            assert_same(leaf.grad.to(torch.float64), 2 * weights)
            if type(leaf) is GlobalTensor:
                assert len(leaf.sbp) == axes
                assert leaf.grad._spec is leaf._spec.settled.with_dtype(leaf.grad.dtype)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_gradient_lands_as_the_leaf_lies(name: str) -> None:
    for world in in_turn(list(FACTORIES).index(name)):
        pool(world).run(_lands, name, GRIDS[world])


@on_ranks(2)
def test_such_a_leaf_has_the_values_and_the_errors_of_torch(rank: int) -> None:
    x = Laid(Placement("cpu", [0, 1]))(randn(5, 4), S(0))
    assert_same(torch.full_like(x, 3.0, requires_grad=True), torch.full((5, 4), 3.0).double())
    assert_same(x.new_ones(2, dtype=torch.float32, requires_grad=True), torch.ones(2))
    with torch.no_grad():
        assert torch.zeros_like(x, requires_grad=True).requires_grad
    assert not torch.zeros_like(x, requires_grad=False).requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        torch.zeros_like(x, dtype=torch.int64, requires_grad=True)
