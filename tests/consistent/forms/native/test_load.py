"""Random values are functions of the logical element: the same bits however the tensor is cut."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.forms.native import load as native
from tests.each_of import each_of

KEY = {"seed": 20240229, "counter": 3}
MANY = 1 << 20

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]

REAL_FILLS = {
    "uniform_": partial(native.uniform_, low=-1.5, high=2.5),
    "normal_": partial(native.normal_, mean=0.5, std=2.0),
    "log_normal_": partial(native.log_normal_, mean=0.1, std=0.5),
    "exponential_": partial(native.exponential_, rate=1.5),
    "cauchy_": partial(native.cauchy_, median=0.5, scale=2.0),
}
WHOLE_FILLS = {
    "geometric_": partial(native.geometric_, p=0.2),
    "bernoulli_": partial(native.bernoulli_, p=0.3),
    "randint_": partial(native.randint_, low=0, high=2),
}
FILLS = REAL_FILLS | WHOLE_FILLS


def reference_philox(seed, counter, block):
    """Philox4x32-10 as in its paper, on Python integers."""
    low = (1 << 32) - 1
    c = [block & low, block >> 32, counter & low, counter >> 32]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & low, (p >> 32) ^ c[3] ^ k[1], p & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


def words32(*shape, **where):
    return native.randint_(torch.empty(shape, dtype=torch.int64), 0, 1 << 32, **where)


@st.composite
def boxes(draw):
    """(logical sizes, starts, stops) of a random box, empty ones included."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=4))
    starts = [draw(st.integers(0, n)) for n in sizes]
    return sizes, starts, [draw(st.integers(i, n)) for i, n in zip(starts, sizes)]


def part_of(whole, starts, stops):
    return whole[tuple(slice(i, j) for i, j in zip(starts, stops))]


# --- the words


def test_known_answer_of_philox():
    words = words32(4, seed=0, counter=0)
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert reference_philox(0, 0, 0) == words.tolist()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**60))
def test_words_are_philox_of_seed_counter_and_element(seed, counter, first):
    words = words32(9, seed=seed, counter=counter, starts=[first], logical_sizes=[2**62]).tolist()
    wanted = [reference_philox(seed, counter, e // 4)[e % 4] for e in range(first, first + 9)]
    assert words == wanted


def test_block_carries_beyond_32_bits():
    first = 4 * (2**32 - 70)
    words = words32(600, seed=1, counter=2, starts=[first], logical_sizes=[2**40])
    wanted = [reference_philox(1, 2, e // 4)[e % 4] for e in range(first, first + 600)]
    assert words.tolist() == wanted


def test_double_takes_two_words_an_element():
    values = native.uniform_(torch.empty(6, dtype=torch.float64), seed=5, counter=7)
    for e, value in enumerate(values.tolist()):
        low, high = reference_philox(5, 7, e // 2)[2 * (e % 2) :][:2]
        assert value == ((high << 32 | low) >> 11) * 2.0**-53


def test_float_takes_the_upper_24_bits_of_its_word():
    values = native.uniform_(torch.empty(6), seed=5, counter=7).tolist()
    assert values == [(reference_philox(5, 7, e // 4)[e % 4] >> 8) * 2.0**-24 for e in range(6)]


@each_of("change", [{"seed": 1}, {"seed": 2**32}, {"counter": 4}])
def test_another_seed_or_counter_gives_other_values(change):
    one, other = native.uniform_(torch.empty(1000), **KEY), torch.empty(1000)
    native.uniform_(other, **(KEY | change))
    assert (one == other).sum() < 3


# --- however it is cut


@given(boxes(), st.sampled_from(sorted(FILLS)), st.sampled_from(FLOATING))
@settings(max_examples=300)
def test_shard_is_the_slice_of_the_whole(box, name, dtype):
    sizes, starts, stops = box
    whole = FILLS[name](torch.empty(sizes, dtype=dtype), **KEY)
    local = torch.empty([j - i for i, j in zip(starts, stops)], dtype=dtype)
    FILLS[name](local, **KEY, starts=starts, logical_sizes=sizes)
    assert torch.equal(local, part_of(whole, starts, stops))


@given(boxes(), st.sampled_from(sorted(WHOLE_FILLS)), st.sampled_from(WHOLE))
def test_shard_of_whole_numbers_is_the_slice_of_the_whole(box, name, dtype):
    sizes, starts, stops = box
    whole = FILLS[name](torch.empty(sizes, dtype=dtype), **KEY)
    local = torch.empty([j - i for i, j in zip(starts, stops)], dtype=dtype)
    FILLS[name](local, **KEY, starts=starts, logical_sizes=sizes)
    assert torch.equal(local, part_of(whole, starts, stops))


@given(boxes(), st.sampled_from(FLOATING))
def test_dropout_of_a_shard_is_the_slice_of_the_whole(box, dtype):
    sizes, starts, stops = box
    x = torch.arange(1, math.prod(sizes) + 1, dtype=dtype).reshape(sizes)
    local = native.dropout(part_of(x, starts, stops), **KEY, starts=starts, logical_sizes=sizes)
    assert torch.equal(local, part_of(native.dropout(x, **KEY), starts, stops))


@given(boxes())
def test_bernoulli_of_a_tensor_p_is_the_slice_of_the_whole(box):
    sizes, starts, stops = box
    p = native.uniform_(torch.empty(sizes), seed=1, counter=1)
    whole = native.bernoulli_(torch.empty(sizes), p, **KEY)
    chances = part_of(p, starts, stops)
    local = torch.empty(chances.shape)
    native.bernoulli_(local, chances, **KEY, starts=starts, logical_sizes=sizes)
    assert torch.equal(local, part_of(whole, starts, stops))


@each_of("name", sorted(FILLS))
def test_large_shard_is_the_slice_of_the_whole(name):
    whole = FILLS[name](torch.empty(37, 41, 53), **KEY)
    for starts, stops in [
        ((5, 0, 0), (31, 41, 53)),
        ((3, 7, 0), (9, 40, 53)),
        ((0, 0, 17), (37, 41, 52)),
    ]:
        local = torch.empty([j - i for i, j in zip(starts, stops)])
        FILLS[name](local, **KEY, starts=starts, logical_sizes=whole.shape)
        assert torch.equal(local, part_of(whole, starts, stops))


@each_of("name", sorted(FILLS))
def test_number_of_threads_does_not_matter(name):
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(FILLS[name](torch.empty(100_003), **KEY))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@each_of("name", sorted(FILLS))
def test_memory_order_does_not_matter(name):
    out = torch.zeros(7, 2, 9).transpose(0, 2)[:, :, ::2]
    FILLS[name](out, **KEY)
    assert torch.equal(out, FILLS[name](torch.empty(out.shape), **KEY))


# --- what the values are


@each_of("dtype", FLOATING)
@each_of(("low", "high"), [(0.0, 1.0), (-3.0, -1.0), (0.1, 0.1), (-1e-3, 2.0), (1.0, 1.01)])
def test_uniform_stays_below_high(dtype, low, high):
    x = native.uniform_(torch.empty(MANY, dtype=dtype), low, high, **KEY).double()
    assert x.min() >= torch.tensor(low, dtype=dtype).double() - 1e-9 or x.min() >= low
    assert x.max() < high or low == high


@each_of("dtype", FLOATING)
def test_uniform_is_level(dtype):
    x = native.uniform_(torch.empty(MANY, dtype=dtype), **KEY).double()
    counts = torch.histc(x, bins=16, min=0, max=1)
    assert ((counts - MANY / 16).abs() < 6 * math.sqrt(MANY / 16) + MANY / 256).all()
    assert abs(x.mean() - 0.5) < 0.004


def normal_distance(x):
    """Kolmogorov and Smirnov's greatest distance between the values and the normal law."""
    x = x.double().sort().values
    steps = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    law = 0.5 * torch.erfc(-x / math.sqrt(2))
    return max((law - steps[:-1]).abs().max(), (law - steps[1:]).abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_follows_the_normal_law(dtype):
    x = native.normal_(torch.empty(MANY, dtype=dtype), **KEY)
    assert normal_distance(x) < 1.95 / math.sqrt(MANY)  # exceeded once in a thousand seeds
    x = x.double()
    moments = [x.mean(), x.var() - 1, (x**3).mean(), (x**4).mean() - 3]
    errors = [1, math.sqrt(2), math.sqrt(15), math.sqrt(96)]
    assert all(abs(m) < 5 * e / math.sqrt(MANY) for m, e in zip(moments, errors))


def test_neighbouring_normals_are_independent():
    x = native.normal_(torch.empty(MANY), **KEY).double()
    for lag in (1, 2, 3, 4):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 / math.sqrt(MANY)


def test_normal_has_tails():
    x = native.normal_(torch.empty(1 << 24), **KEY).abs()
    for bound in (3.0, 4.0, 5.0):
        wanted = math.erfc(bound / math.sqrt(2)) * len(x)
        assert abs((x > bound).sum() - wanted) < 5 * math.sqrt(wanted) + 3
    assert x.max() < 7


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 24), (torch.float64, 53)])
def test_normal_is_box_muller_to_the_last_bits(dtype, bits):
    x = native.normal_(torch.empty(4096, dtype=dtype), seed=5, counter=7).double()
    for e in range(0, len(x), 2):
        if dtype == torch.float32:
            first, second = reference_philox(5, 7, e // 4)[e % 4 :][:2]
            size = 1 << 32
        else:
            a, b, c, d = reference_philox(5, 7, e // 2)
            first, second, size = b << 32 | a, d << 32 | c, 1 << 64
        from_one = (size - first - 0.5) / size
        logarithm = math.log1p(-from_one) if from_one < 0.5 else math.log((first + 0.5) / size)
        turn = second - size if second > size / 2 else second
        radius, angle = math.sqrt(-2 * logarithm), 2 * math.pi * turn / size
        bound = 8 * radius * 2.0**-bits  # half of it for the reference's own angle
        assert abs(x[e] - radius * math.cos(angle)) < bound
        assert abs(x[e + 1] - radius * math.sin(angle)) < bound


@each_of("dtype", FLOATING)
@each_of("name", ["exponential_", "log_normal_", "cauchy_", "geometric_"])
def test_quantiles_are_torchs(name, dtype):
    n = 1 << 18
    ours = FILLS[name](torch.empty(n, dtype=dtype), **KEY).double().sort().values
    arguments = list(FILLS[name].keywords.values())
    torch.manual_seed(0)
    theirs = getattr(torch.empty(n, dtype=torch.float64), name)(*arguments).sort().values
    for q in (0.02, 0.1, 0.5, 0.9, 0.98):
        below = (
            (theirs <= ours[int(q * n)]).double().mean(),
            (theirs < ours[int(q * n)]).double().mean(),
        )
        assert below[1] - 0.01 < q < below[0] + 0.01


def test_exponential_is_above_zero():
    assert native.exponential_(torch.empty(1 << 24), **KEY).min() > 0


@each_of("p", [0.0, 0.25, 0.5, 1.0])
@each_of("dtype", FLOATING + WHOLE)
def test_bernoulli_has_its_probability(p, dtype):
    x = native.bernoulli_(torch.empty(MANY, dtype=dtype), p, **KEY).double()
    assert set(x.unique().tolist()) <= {0.0, 1.0}
    assert abs(x.mean() - p) <= 5 * math.sqrt(p * (1 - p) / MANY)


def test_bernoulli_of_a_tensor_agrees_with_that_of_a_number():
    p = torch.full((1000,), 0.3, dtype=torch.float64)
    one = native.bernoulli_(torch.empty(1000), p, **KEY)
    assert torch.equal(one, native.bernoulli_(torch.empty(1000), 0.3, **KEY))


@each_of(
    ("low", "high"), [(0, 10), (-7, 3), (5, 6), (0, 2**32), (-(2**63), 2**63 - 1), (-5, 2**40)]
)
def test_randint_stays_in_its_range_and_is_level(low, high):
    x = native.randint_(torch.empty(MANY, dtype=torch.int64), low, high, **KEY)
    assert x.min() >= low and x.max() < high
    middle = (low + high - 1) / 2
    assert abs(x.double().mean() - middle) <= 5 * (high - low) / math.sqrt(12 * MANY)
    if high - low <= 10:
        assert x.unique().tolist() == list(range(low, high))


@each_of("dtype", FLOATING + WHOLE)
def test_randint_is_the_same_number_in_every_dtype(dtype):
    high = 2 if dtype == torch.bool else 100
    wanted = native.randint_(torch.empty(1000, dtype=torch.int64), 0, high, **KEY)
    assert torch.equal(
        native.randint_(torch.empty(1000, dtype=dtype), 0, high, **KEY), wanted.to(dtype)
    )


@each_of("dtype", [torch.float16, torch.bfloat16])
@each_of("name", ["normal_", "exponential_", "cauchy_", "log_normal_"])
def test_narrow_floats_are_rounded_from_float32(dtype, name):
    wide = FILLS[name](torch.empty(100_000), **KEY)
    assert torch.equal(FILLS[name](torch.empty(100_000, dtype=dtype), **KEY), wide.to(dtype))


@each_of("n", [0, 1, 2, 1000])
def test_randperm_is_a_permutation(n):
    order = native.randperm(n, **KEY)
    assert order.dtype == torch.int64 and order.sort().values.tolist() == list(range(n))


def test_randperm_sorts_by_philox_keys():
    words = [reference_philox(5, 7, e // 2)[2 * (e % 2) :][:2] for e in range(50)]
    keys = torch.tensor([(high << 32 | low) - (high >> 31 << 64) for low, high in words])
    assert native.randperm(50, seed=5, counter=7).tolist() == keys.argsort(stable=True).tolist()


# --- dropout


@each_of("dtype", FLOATING)
def test_dropout_keeps_where_bernoulli_is_one(dtype):
    x = native.normal_(torch.empty(100, 33, dtype=dtype), seed=1, counter=1)
    keep = native.bernoulli_(torch.empty(100, 33), 0.75, **KEY).bool()
    wanted = torch.where(keep, x.double() / 0.75, 0).to(dtype)
    torch.testing.assert_close(native.dropout(x, 0.25, **KEY), wanted)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_none_and_all_is_torchs(p):
    x = torch.tensor([1.0, -2.0, 0.0, math.inf, -math.inf, math.nan])
    ours, theirs = native.dropout(x, p, **KEY), F.dropout(x, p)
    assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_dropout_is_differentiable_twice(p):
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    drop = partial(native.dropout, p=p, **KEY, starts=[1, 2], logical_sizes=[6, 9])
    assert torch.autograd.gradcheck(drop, x)
    assert torch.autograd.gradgradcheck(drop, x)


def test_dropout_gradient_has_the_mask_of_the_forward():
    x = torch.ones(1000, requires_grad=True)
    y = native.dropout(x, 0.3, **KEY)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_reads_x_in_any_memory_order():
    x = torch.randn(6, 8)[:, ::2].t()
    assert torch.equal(native.dropout(x, **KEY), native.dropout(x.contiguous(), **KEY))


# --- what torch asks of an op


def arguments_of(name):
    x, where = torch.zeros(3, 4), (1, 2, [1, 2], [5, 7])
    return {
        "uniform_": (x, 0.0, 1.0, *where),
        "normal_": (x, 0.0, 1.0, *where),
        "log_normal_": (x, 0.0, 1.0, *where),
        "exponential_": (x, 1.0, *where),
        "cauchy_": (x, 0.0, 1.0, *where),
        "geometric_": (x, 0.5, *where),
        "bernoulli_": (x, 0.5, *where),
        "bernoulli_tensor_": (x, torch.full((3, 4), 0.5), *where),
        "randint_": (x, 0, 10, *where),
        "dropout": (torch.randn(3, 4, requires_grad=True), 0.5, *where),
        "randperm": (10, 1, 2),
    }[name]


OPS = [*sorted(FILLS), "bernoulli_tensor_", "dropout", "randperm"]


@each_of("name", OPS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.consistent, name).default, arguments_of(name))


@each_of("name", sorted(FILLS))
def test_meta_tensors_pass_through(name):
    out = torch.empty(3, 4, device="meta")
    assert FILLS[name](out, **KEY) is out


def test_dropout_and_randperm_on_meta_have_their_shapes():
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    native.dropout(x, **KEY).sum().backward()
    assert x.grad is not None and x.grad.shape == (3, 4) and x.grad.is_meta
    assert native.randperm(5, **KEY, device="meta").shape == (5,)


def test_filling_counts_as_a_change_for_autograd():
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (x * w).sum()
    native.uniform_(x, **KEY)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_zero_dims_and_no_elements():
    assert native.uniform_(torch.empty(()), **KEY) == native.uniform_(torch.empty(1), **KEY)
    assert native.normal_(torch.empty(0, 3), **KEY).shape == (0, 3)
    assert native.dropout(torch.empty(2, 0), **KEY).shape == (2, 0)


# --- misuse is answered with words


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: native.uniform_(torch.empty(3, dtype=torch.int64), **KEY), "use a floating dtype"),
        (lambda: native.normal_(torch.empty(3, dtype=torch.complex64), **KEY), "call randint_"),
        (lambda: native.uniform_(torch.empty(3), 2.0, 1.0, **KEY), "the lower one first"),
        (lambda: native.normal_(torch.empty(3), 0.0, -1.0, **KEY), "std=-1 was given"),
        (lambda: native.bernoulli_(torch.empty(3), 1.5, **KEY), "p=1.5 was given"),
        (
            lambda: native.bernoulli_(torch.empty(3), torch.full((3,), 1.5), **KEY),
            "1.5, and a prob",
        ),
        (lambda: native.bernoulli_(torch.empty(3), torch.empty(2), **KEY), "expand"),
        (lambda: native.randint_(torch.empty(3), 4, 4, **KEY), "holds no integer"),
        (lambda: native.randint_(torch.empty(3, dtype=torch.uint8), 0, 300, **KEY), "wider dtype"),
        (lambda: native.randperm(-1, **KEY), "pass n >= 0"),
        (lambda: native.dropout(torch.zeros(3, dtype=torch.int32), **KEY), "torch.float32"),
        (lambda: native.dropout(torch.zeros(3), 1.5, **KEY), "between 0 and 1"),
        (lambda: native.uniform_(torch.empty(3), **KEY, starts=[0, 0]), "each dim needs one"),
        (lambda: native.uniform_(torch.empty(3), **KEY, starts=[2], logical_sizes=[4]), "only 4"),
        (lambda: native.uniform_(torch.empty(3, requires_grad=True), **KEY), "torch.no_grad"),
        (lambda: native.uniform_(torch.empty(3).to_sparse(), **KEY), "Sparse|sparse"),
    ],
)
def test_misuse_says_what_why_and_what_next(call, words):
    with pytest.raises((RuntimeError, NotImplementedError), match=words):
        call()


# -- a copy past the caches ------------------------------------------------------------------------


@given(
    size=st.integers(0, 1000), start=st.integers(0, 70), shift=st.integers(0, 70),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]),
)  # fmt: skip
def test_a_streamed_copy_writes_what_it_is_given_and_nothing_else(size, start, shift, dtype):
    source = torch.randint(0, 100, (size + start,)).to(dtype)[start:]
    held = torch.full((size + shift + 1,), 7, dtype=dtype)
    out = held[shift : shift + size]
    assert native.streamed_copy_(out, source) is out
    assert torch.equal(out, source)
    rest = torch.cat([held[:shift], held[shift + size :]])
    assert torch.equal(rest, torch.full_like(rest, 7))


@pytest.mark.parametrize(
    ("out", "source"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3, 2), torch.zeros(2, 3).T),
        (torch.zeros(3), torch.zeros(3).to_sparse()),
    ],
)
def test_a_streamed_copy_refuses_what_is_no_copy_of_bytes(out, source):
    with pytest.raises((RuntimeError, NotImplementedError), match="streamed_copy_"):
        native.streamed_copy_(out, source)
