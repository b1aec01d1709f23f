"""What a rank says of its classes, and their gradient: the native ops by themselves, joined here
by hand and compared with torch on the whole."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.forms.native import load as native

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ops = torch.ops.consistent


def said(x, target, weight=None, dim=1, start=0, smooth=False):
    return native.split_cross_entropy(x, target, weight, dim, start, smooth)


def losses_of(x, target, cuts, dim):
    """Losses from what each part of the classes, between ``cuts``, says."""
    parts = [
        said(x.narrow(dim, a, b - a), target, None, dim, a)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    largest = torch.stack([p[0] for p in parts]).amax(0)
    total = sum(p[1] * (p[0] - largest).exp() for p in parts)
    return total.log() + largest - sum(p[2] for p in parts), largest, total


shapes = st.sampled_from([((3,), 1), ((2, 5), 1), ((2, 17, 3), 1), ((40,), 0), ((2, 1, 2), 1)])


@given(
    rows=shapes,
    classes=st.integers(1, 700),
    cuts=st.lists(st.integers(0, 700), max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_parts_of_any_size_join_to_the_loss_and_its_gradient(rows, classes, cuts, dtype, seed):
    (lead, *rest), dim = rows
    random = torch.Generator().manual_seed(seed)
    shape = (classes, lead) if dim == 0 else (lead, classes, *rest)
    x = (torch.randn(shape, generator=random) * 5).to(dtype)
    target = torch.randint(0, classes, x.sum(dim).shape, generator=random)
    cuts = [0, *sorted(min(c, classes) for c in cuts), classes]
    whole = x.double().movedim(dim, 1).requires_grad_()
    wanted = F.cross_entropy(whole, target, reduction="none")
    losses, largest, total = losses_of(x, target, cuts, dim)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=1e-5)

    slope = torch.randn(target.shape, generator=random, dtype=torch.float64)
    (wanted_grad,) = torch.autograd.grad(wanted, whole, slope)
    slope = slope.to(largest.dtype)
    numbers = torch.stack([largest, slope / total, torch.zeros_like(total), slope])
    found = [
        native.split_cross_entropy_backward(x.narrow(dim, a, b - a), target, numbers, None, dim, a)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    made = torch.cat(found, dim).movedim(dim, 1)
    assert made.dtype == dtype
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    torch.testing.assert_close(made.double(), wanted_grad, rtol=tolerance, atol=tolerance)


def test_sums_of_weighted_logits_are_given_for_smoothing():
    x, weight = torch.randn(4, 300, dtype=torch.float64), torch.rand(300, dtype=torch.float64)
    target = torch.arange(4)
    largest, _, _, weighted, weights = said(x, target, weight, smooth=True)
    torch.testing.assert_close(weighted + weights * largest, x @ weight)
    torch.testing.assert_close(weights, weight.sum().expand(4))
    assert torch.equal(said(x, target, None, smooth=True)[4], torch.full((4,), 300.0).double())


@pytest.mark.parametrize("place", [0, 63, 64, 2047, 2048, 4999])
def test_the_largest_may_stand_anywhere_in_a_long_row(place):
    x = torch.zeros(1, 5000)
    x[0, place] = 60.0
    largest, total, picked = said(x, torch.tensor([place]))
    assert (largest, picked) == (60.0, 60.0)
    torch.testing.assert_close(total, torch.tensor([1 + 4999 * math.exp(-60)]))


def test_minus_infinity_is_a_class_that_cannot_be():
    x = torch.tensor([[-math.inf, 1.0], [-math.inf, -math.inf]])
    largest, total, picked = said(x, torch.tensor([0, 5]))
    assert largest.tolist() == [1.0, -math.inf] and total.tolist() == [1.0, 0.0]
    assert picked.tolist() == [-math.inf, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_make_the_sum_nan(bad):
    x = torch.zeros(1, 100)
    x[0, 70] = bad
    assert said(x, torch.tensor([0]))[1].isnan()


def test_no_classes_say_nothing():
    largest, total, picked = said(torch.empty(3, 0), torch.arange(3))
    assert largest.tolist() == [-math.inf] * 3 and not total.any() and not picked.any()
    assert said(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)).shape == (3, 0)


def test_a_row_that_does_not_count_gets_zeros_whatever_it_holds():
    x = torch.full((2, 5), math.nan)
    numbers = torch.zeros(4, 2)
    made = native.split_cross_entropy_backward(x, torch.tensor([0, -100]), numbers, None, 1, 0)
    assert torch.equal(made, torch.zeros(2, 5))


def test_any_memory_order_is_read():
    x = torch.randn(300, 6)[:, ::2].t()
    target = torch.tensor([1, 200, 7])
    assert torch.equal(said(x, target), said(x.contiguous(), target))


def test_a_misaligned_row_is_read():
    memory = torch.randn(7 * 33 + 1)
    x = memory[1:].view(7, 33)
    assert torch.equal(said(x, torch.arange(7)), said(x.clone(), torch.arange(7)))


@pytest.mark.parametrize("smooth", [False, True])
def test_opcheck(smooth):
    x, target = torch.randn(3, 4, 2), torch.zeros(3, 2, dtype=torch.int64)
    torch.library.opcheck(ops.split_cross_entropy.default, (x, target, None, 1, 0, smooth))
    rows = torch.zeros(4, 3, 2)
    torch.library.opcheck(
        ops.split_cross_entropy_backward.default, (x, target, rows, torch.rand(4), 1, 0)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, t: said(x.long(), t), "convert it"),
        (lambda x, t: said(x, t.float()), "torch.int64"),
        (lambda x, t: said(x, t[:1]), "each row needs one target"),
        (lambda x, t: said(x, t, torch.ones(2)), "weights of the classes held here"),
        (lambda x, t: said(x, t, None, 4), "counted from the front"),
        (lambda x, t: said(x.to_sparse(), t), "parse"),
        (
            lambda x, t: native.split_cross_entropy_backward(x, t, torch.ones(3, 2), None, 1, 0),
            "reference, scale, shift and pick",
        ),
    ],
)
def test_misuse_says_what_why_and_what_next(call, words):
    with pytest.raises((RuntimeError, NotImplementedError), match=words):
        call(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
