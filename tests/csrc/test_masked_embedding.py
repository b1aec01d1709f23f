"""Look-up in a part of a table, and its gradient: the native ops by themselves, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.forms.native import load as native

ops = torch.ops.consistent
FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def index_of(rows, *shape, seed=0):
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 30),
    width=st.sampled_from([0, 1, 3, 8, 600]),
    cut=st.integers(0, 30),
    shape=st.sampled_from([(), (0,), (7,), (3, 50)]),
    dtype=st.sampled_from(FLOATING),
    scale=st.sampled_from([1.0, 2.5]),
)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_to_the_whole_look_up_and_its_gradient(rows, width, cut, shape, dtype, scale):
    table, index, cut = torch.randn(rows, width).to(dtype), index_of(rows, *shape), min(cut, rows)
    parts = [(table[:cut], 0), (table[cut:], cut)]
    made = sum(native.masked_embedding(part, index, start, scale) for part, start in parts)
    torch.testing.assert_close(made, table[index] * scale)

    grad = torch.randn(*shape, width).to(dtype)
    wide = torch.zeros(rows, width, dtype=torch.float64)
    wide.index_add_(0, index.flatten(), grad.double().reshape(index.numel(), width) * scale)
    found = [
        native.masked_embedding_backward(grad, index, len(part), start, scale=scale)
        for part, start in parts
    ]
    torch.testing.assert_close(torch.cat(found), wide.to(dtype), rtol=1e-2, atol=1e-4)


def test_sums_of_bfloat16_gradients_are_rounded_once():
    grad = torch.full((1000, 1), 1.0, dtype=torch.bfloat16)
    index = torch.zeros(1000, dtype=torch.int64)
    assert native.masked_embedding_backward(grad, index, 1, 0).item() == 1000


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("by_count", [False, True])
def test_gradient_is_torchs(padding_idx, by_count):
    table, index = torch.randn(6, 5, requires_grad=True), index_of(6, 40)
    grad = torch.randn(40, 5)
    torch.embedding(table, index, padding_idx, by_count).backward(grad)
    made = native.masked_embedding_backward(grad, index, 6, 0, padding_idx, by_count)
    torch.testing.assert_close(made, table.grad)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_tables_of_any_kind_are_looked_up(dtype):
    table = torch.arange(15).view(5, 3).to(dtype)
    made = native.masked_embedding(table, torch.tensor([2, 6, 7]), 2)
    assert torch.equal(made, torch.stack([table[0], table[4], torch.zeros_like(table[0])]))


def test_complex_gradients_are_added():
    grad, index = torch.randn(9, 3, dtype=torch.complex128), index_of(4, 9)
    wanted = torch.zeros(4, 3, dtype=torch.complex128).index_add(0, index, grad)
    torch.testing.assert_close(native.masked_embedding_backward(grad, index, 4, 0), wanted)


def test_any_memory_order_and_short_indices_are_read():
    table, index = torch.randn(3, 8).t()[::2], index_of(4, 6)
    assert torch.equal(native.masked_embedding(table, index.int(), 0), table[index])


def test_nan_of_a_row_that_is_not_looked_up_stays_there():
    table = torch.tensor([[float("nan")], [1.0]])
    assert native.masked_embedding(table, torch.tensor([5, 1]), 0).tolist() == [[0.0], [1.0]]


def test_opcheck():
    index = torch.tensor([[0, 4], [9, 2]])
    torch.library.opcheck(ops.masked_embedding.default, (torch.randn(3, 4), index, 2, 1.0))
    arguments = (torch.randn(2, 2, 4), index, 3, 2, 4, True, 2.0)
    torch.library.opcheck(ops.masked_embedding_backward.default, arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t, i: native.masked_embedding(t[0], i, 0), "pass a matrix"),
        (lambda t, i: native.masked_embedding(t, i.float(), 0), "torch.int64"),
        (lambda t, i: native.masked_embedding(t.long(), i, 0, 2.0), "convert it"),
        (lambda t, i: native.masked_embedding_backward(t, i, 3, 0), "each index has a row"),
        (lambda t, i: native.masked_embedding_backward(t[:2], i, -1, 0), "0 or more"),
    ],
)
def test_misuse_says_what_why_and_what_next(call, words):
    with pytest.raises(RuntimeError, match=words):
        call(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
