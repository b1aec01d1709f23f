"""Codecs: how many bytes, how near, and what becomes of what is not finite."""

from __future__ import annotations

import pytest
import torch

from mirrored.codecs import BLOCK, CODECS, Blocks, Codec, codec_of_dtype
from mirrored.reduction import accumulation_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000)
# Of a block's largest number, or of each number: the most by which one is rounded.
STEPS = {"bf16": 2**-8, "int8": 0.5 / 127, "fp8": 2**-4}


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_the_formula_and_numbers_are_near(name: str) -> None:
    codec, rng = CODECS[name], torch.Generator().manual_seed(0)
    for n in SIZES:
        wanted = 2 * n if name == "bf16" else n + 4 * -(-n // 256)
        for dtype in DTYPES:
            x = torch.randn(n, generator=rng).to(dtype)
            message = codec.write(x)
            assert message.dtype is torch.uint8
            assert message.numel() == codec.nbytes(n) == wanted
            y = codec.read([message], n, dtype)
            assert y.dtype is dtype and y.shape == (n,)
            for a, b in zip(x.double().split(BLOCK), y.double().split(BLOCK), strict=True):
                most = STEPS[name] + torch.finfo(dtype).eps
                assert not n or (a - b).abs().max() <= most * a.abs().max()


@pytest.mark.parametrize("name", CODECS)
def test_a_message_may_begin_at_any_byte_and_gives_new_memory(name: str) -> None:
    codec, x = CODECS[name], torch.randn(300)
    message = codec.write(x.view(10, 30).T)
    assert torch.equal(message, codec.write(x.view(10, 30).T.contiguous().view(-1)))
    moved = torch.cat([message.new_zeros(3), message])[3:]
    first, second = (codec.read([m], 300, torch.float32) for m in (message, moved))
    assert torch.equal(first, second)
    first.zero_()
    assert torch.equal(codec.read([message], 300, torch.float32), second)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_block_that_is_not_finite_is_nan_whole_and_others_stay(name: str, bad: float) -> None:
    codec = CODECS[name]
    x = torch.linspace(-1, 1, 3 * BLOCK - 7, dtype=torch.float64)
    x[BLOCK + 3] = bad
    y = codec.read([codec.write(x)], x.numel(), torch.float64)
    assert y[BLOCK : 2 * BLOCK].isnan().all()
    assert y[:BLOCK].isfinite().all() and y[2 * BLOCK :].isfinite().all()


def test_bfloat16_keeps_what_is_not_finite() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    y = CODECS["bf16"].read([CODECS["bf16"].write(x)], 4, torch.float32)
    assert y.isnan().tolist() == [True, False, False, False] and torch.equal(y[1:], x[1:])


def test_the_smallest_numbers_do_not_turn_around() -> None:
    """A scale that a float32 does not hold: numbers become zero or smaller, never of other sign."""
    for codec in (c for c in CODECS.values() if isinstance(c, Blocks)):
        for most in (1e-45, 190e-45, 1e-42, 1e-38):
            x = torch.linspace(-most, most, BLOCK)
            y = codec.read([codec.write(x)], BLOCK, torch.float32)
            assert (x * y >= 0).all() and (y.abs() <= 2 * most).all()


def test_zeros_stay_zeros() -> None:
    for codec in CODECS.values():
        message = codec.write(torch.zeros(600))
        y = codec.read([message], 600, torch.float32)
        assert torch.equal(y, torch.zeros(600))


def awkward(n: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Numbers of all magnitudes, zeros, and in some blocks what is not finite."""
    x = torch.randn(n, generator=rng, dtype=torch.float64)
    x *= (
        10.0
        ** torch.randint(-50, 39, (-(-n // BLOCK),), generator=rng).repeat_interleave(BLOCK)[:n]
    )
    x[torch.rand(n, generator=rng) < 0.1] = 0
    bad = torch.rand(n, generator=rng) < 1 / BLOCK / 4
    x[bad] = torch.tensor([torch.nan, torch.inf, -torch.inf])[
        torch.arange(int(bad.sum())) % 3
    ].double()
    return x.to(dtype)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_code_and_ops_of_torch_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    codec, rng = CODECS[name], torch.Generator().manual_seed(1)
    assert isinstance(codec, Blocks)
    for n in (*SIZES, 40 * BLOCK + 3):
        x, rest = (awkward(n, each, rng) for each in (dtype, accumulation_dtype(dtype)))
        rest.nan_to_num_(0.0, 0.0, 0.0)
        by_ops = rest.clone()
        messages = [codec.write(x, rest), codec.write(x)]
        theirs = [codec._write_by_ops(x, by_ops), codec._write_by_ops(x, None)]
        for mine, other in zip(messages, theirs, strict=True):
            scales = (m[: m.numel() - n].view(torch.float32) for m in (mine, other))
            torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(mine[mine.numel() - n :], other[mine.numel() - n :])
        assert torch.equal(rest, by_ops) and rest.isfinite().all()
        for k in (1, 2):
            wanted = codec._read_by_ops(theirs[:k], n, dtype)
            found = codec.read([*messages[:k]], n, dtype)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_left_out_is_kept(name: str, dtype: torch.dtype) -> None:
    """Sent again and again, a number arrives on average as it is, in short floats too."""
    codec, x = CODECS[name], torch.linspace(-3, 1, 2 * BLOCK + 5).to(dtype)
    unsent, sent = torch.zeros_like(x, dtype=accumulation_dtype(dtype)), torch.zeros(x.shape)
    for _ in range(50):
        sent += codec.read([codec.write(x, unsent)], x.numel(), torch.float32)
    assert (sent + unsent - 50 * x.float()).abs().max() < 1e-3


@pytest.mark.parametrize(
    "codec",
    [
        *CODECS.values(),
        codec_of_dtype(torch.float16),
        codec_of_dtype(torch.float8_e5m2),
        codec_of_dtype(torch.float64),
    ],
    ids=lambda codec: codec.name,
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_real_dtypes_refuse_complex_numbers(codec: Codec, dtype: torch.dtype) -> None:
    with pytest.raises((ValueError, RuntimeError), match="(?i)complex"):
        codec.write(torch.ones(3, dtype=dtype))
