"""The fused sum: the native op by itself, against torch's ops one after the other."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.forms.native import load as native

op = torch.ops.consistent.reduce_shards
FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    count=st.integers(1, 5),
    shape=st.sampled_from([(3,), (4, 7), (5, 3, 16), (2, 3, 1100), (0, 4), (3, 0)]),
    cut=st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)),
    dtype=st.sampled_from(FLOATING),
    scale=st.sampled_from([1.0, 0.5]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    biased=st.booleans(),
    added=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_sum_scale_bias_residual_and_activation_of_any_slice(
    count, shape, cut, dtype, scale, activation, biased, added
):
    dim = cut[0] % len(shape)
    start = min(cut[1], shape[dim])
    size = min(cut[2], shape[dim] - start)
    parts = [numbers(*shape, seed=i, dtype=dtype) for i in range(count)]
    total = sum(p.double() for p in parts).narrow(dim, start, size) * scale
    bias = numbers(total.shape[-1], seed=8, dtype=dtype) if biased else None
    residual = numbers(*total.shape, seed=9, dtype=dtype) if added else None
    for more in (bias, residual):
        total = total if more is None else total + more.double()
    out, kept = native.reduce_shards(
        parts, dim, start, size,
        scale=scale, bias=bias, residual=residual, activation=activation, keep_total=True,
    )  # fmt: skip
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    assert out.dtype == kept.dtype == dtype
    torch.testing.assert_close(kept.double(), total, **close)
    torch.testing.assert_close(out.double(), ACTIVATIONS[activation](total), **close)


@given(
    shape=st.sampled_from([(4, 7), (5, 3, 64), (2, 3, 1100), (3, 2, 0)]),
    normalized=st.integers(1, 2),
    norm=st.sampled_from(["layer", "rms"]),
    dtype=st.sampled_from(FLOATING),
    affine=st.tuples(st.booleans(), st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_norms_of_the_activated_total(shape, normalized, norm, dtype, affine):
    parts = [numbers(*shape, seed=i, dtype=dtype) for i in range(3)]
    tail = shape[len(shape) - normalized :]
    weight, bias = (numbers(*tail, seed=5 + i) if on else None for i, on in enumerate(affine))
    total = sum(p.double() for p in parts).relu()
    if norm == "layer":
        wanted = F.layer_norm(total, tail, weight, bias, 1e-5)
    else:
        wanted = F.rms_norm(total, tail, weight, 1e-5) + (0 if bias is None else bias)
    out, _ = native.reduce_shards(
        parts, 0, 0, shape[0],
        activation="relu", norm=norm, normalized=normalized, weight=weight, norm_bias=bias,
    )  # fmt: skip
    close = {"rtol": 5 * TOLERANCE[dtype], "atol": 5 * TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), wanted, **close)


def test_parts_are_added_in_order_and_rounded_once():
    parts = [torch.full((3,), x, dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, -256.0)]
    assert native.reduce_shards(parts, 0, 0, 3)[0].tolist() == [2.0] * 3
    wide = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    assert native.reduce_shards(wide, 0, 0, 1)[0].item() == sum(wide).item()


def test_the_result_may_be_of_another_dtype():
    parts = [numbers(4, 5, seed=i, dtype=torch.bfloat16) for i in range(2)]
    out, _ = native.reduce_shards(parts, 0, 0, 4, dtype=torch.float32)
    assert torch.equal(out, parts[0].float() + parts[1].float())


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_nan_and_infinity_go_as_in_torch(activation):
    x = torch.tensor([math.nan, math.inf, -1e30, 0.0, -0.0, 1e30, 100.0, -100.0])
    out, _ = native.reduce_shards([x], 0, 0, 8, activation=activation)
    wanted = ACTIVATIONS[activation](x)
    if activation == "gelu":  # torch's vector code gives NaN for infinity
        assert out[1] == math.inf
        wanted[1] = math.inf
    torch.testing.assert_close(out, wanted, equal_nan=True)


def test_any_memory_order_and_misaligned_parts_are_read():
    x, y = numbers(9, 6).t()[::2], numbers(1 + 27)[1:].view(3, 9)
    assert torch.equal(native.reduce_shards([x, y], 1, 2, 5)[0], (x + y)[:, 2:7])


def test_opcheck():
    parts = [numbers(3, 4), numbers(3, 4)]
    torch.library.opcheck(op.default, (parts, 0, 1, 2))
    named = {"norm": "layer", "normalized": 1, "weight": numbers(4), "keep_total": True}
    torch.library.opcheck(op.default, (parts, 0, 1, 2), named)
    parts = [p.bfloat16() for p in parts]
    torch.library.opcheck(op.default, (parts, 1, 1, 2), {"dtype": torch.float32})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: native.reduce_shards([x] * 65, 0, 0, 1), "1 to 64"),
        (lambda x: native.reduce_shards([x, x[:1]], 0, 0, 1), "one shape and dtype"),
        (lambda x: native.reduce_shards([x, x.double()], 0, 0, 1), "one shape and dtype"),
        (lambda x: native.reduce_shards([x.long()], 0, 0, 1), "convert it"),
        (lambda x: native.reduce_shards([x], 0, 0, 1, dtype=torch.float16), "convert the result"),
        (lambda x: native.reduce_shards([x], 2, 0, 1), "counted from the front"),
        (lambda x: native.reduce_shards([x], 0, 1, 2), "lies inside"),
        (lambda x: native.reduce_shards([x], 0, 0, 2, activation="tanh"), "apply any other"),
        (lambda x: native.reduce_shards([x], 0, 0, 2, norm="batch"), "apply any other"),
        (lambda x: native.reduce_shards([x], 0, 0, 2, norm="rms"), "both or neither"),
        (lambda x: native.reduce_shards([x], 0, 0, 2, bias=torch.ones(2)), "each needs one"),
        (lambda x: native.reduce_shards([x], 0, 0, 2, residual=x[:1]), "of the result's shape"),
        (
            lambda x: native.reduce_shards([x], 1, 0, 2, norm="rms", normalized=1),
            "cut another dim",
        ),
    ],
)
def test_misuse_says_what_why_and_what_next(call, words):
    with pytest.raises(RuntimeError, match=words):
        call(torch.zeros(2, 3))
