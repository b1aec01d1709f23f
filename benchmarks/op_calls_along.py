"""More calls for op_bytes.py, of ops that act along a dim: attention, transforms, functions of
matrices, joins and cuts, writes, windows.

Chosen from: the attention of decoders with grouped heads, masks and a cache (Llama, Mistral,
Whisper); torch.fft and torch.stft as in Fourier mixing, Fourier neural operators and audio front
ends; torch.linalg as in second-order optimizers (Shampoo, K-FAC), Gaussian processes and
normalizing flows; cat, chunk, split, scatter and index writes of caches and fused projections; the
padding, pooling, resampling and fold layers of the torch.nn page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.least import Ways, any_of, first, letters, moved, pointwise, rows_sent, ways_of
from benchmarks.op_calls import HEADS, IMAGE, X, add

fft, la = torch.fft, torch.linalg

# -- attention -------------------------------------------------------------------------------------

GROUPED, ONE_ROW = (4, 2, 64, 32), (4, 8, 1, 32)


def _gathered(nbytes: float) -> Callable[[Any], float]:
    return lambda case: nbytes * (case.n - 1) / case.n


def _joined_rows(case: Any) -> float:
    """A maximum and a sum for each row, on every rank."""
    return case.everywhere(2 * case.out_bytes / case.out[-1])


add(
    "F.sdpa grouped",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    (HEADS, GROUPED, GROUPED),
    ways_of(
        ((0, 0, 0), 0), ((1, 1, 1), 1), ((2, None, None), 2), ((None, None, 3), 3),
        ((None, 2, 2), "P", _joined_rows), ((2, 2, 2), 2, _gathered(2 * 4 * 4 * 2 * 64 * 32)),
    ),
)  # fmt: skip
add(
    "F.sdpa mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    (HEADS, HEADS, HEADS, ("bool", (64, 64))),
    ways_of(
        ((0, 0, 0, None), 0), ((1, 1, 1, None), 1), ((2, None, None, 0), 2),
        ((None, None, 3, None), 3), ((None, 2, 2, 1), "P", _joined_rows),
    ),
)  # fmt: skip
add(
    "F.sdpa cache",
    lambda k, v, q: F.scaled_dot_product_attention(q, k, v),
    (HEADS, HEADS, ONE_ROW),
    ways_of(
        ((0, 0, 0), 0), ((1, 1, 1), 1), ((None, None, 2), 2), ((None, 3, None), 3),
        ((2, 2, None), "P", _joined_rows),
    ),
)  # fmt: skip

# -- transforms: linear along their dims, so those give P ------------------------------------------

add("fft -1", fft.fft, (X,), first({0: 0, 1: 1, 2: "P"}))
add("rfft 1", lambda x: fft.rfft(x, dim=1), (X,), first({0: 0, 1: "P", 2: 2}))
add("irfft of rfft", lambda x: fft.irfft(fft.rfft(x)), (X,), first({0: 0, 1: 1, 2: "P"}))
add("fft2", fft.fft2, (IMAGE,), first({0: 0, 1: 1, 2: "P", 3: "P"}))
add("fftn", lambda x: fft.fftn(x, dim=(1, 2)), (X,), first({0: 0, 1: "P", 2: "P"}))
add(
    "fftshift",
    lambda x: fft.fftshift(x, -1),
    (X,),
    first({0: 0, 1: 1, 2: 2}, {2: rows_sent(2, 128)}),
)
add(
    "stft",
    lambda x: torch.stft(x, 64, 16, window=torch.ones(64), return_complex=True),
    ((16, 1024),),
    first({0: 0, 1: "P"}),
)

# -- functions of matrices: by batch ---------------------------------------------------------------

BATCH = (64, 16, 16)


def _first_is_batch(call: Callable[[Any], Any]) -> None:
    add(f"linalg.{call.__name__.removeprefix('linalg_')}", call, (BATCH,), first({0: 0}))


for function in (la.qr, la.svdvals, la.inv, la.det, la.slogdet, la.eigvalsh, la.lu, la.matrix_exp):
    _first_is_batch(function)
add(
    "cholesky_solve",
    torch.cholesky_solve,
    ((64, 16, 8), BATCH),
    ways_of(((0, 0), 0), ((2, None), 2)),
)
add("linalg.solve", la.solve, (BATCH, (64, 16, 8)), ways_of(((0, 0), 0), ((None, 2), 2)))
add(
    "linalg.solve_triangular",
    lambda a, b: la.solve_triangular(a + 9 * torch.eye(16), b, upper=True),
    (BATCH, (64, 16, 8)),
    ways_of(((0, 0), 0), ((None, 2), 2)),
)
add(
    "cdist",
    torch.cdist,
    ((8, 64, 32), (8, 48, 32)),
    ways_of(((0, 0), 0), ((1, None), 1), ((None, 1), 2)),
)
add("linalg.vecdot", la.vecdot, (X, X), letters("abk,abk->ab"))
add("linalg.cross", la.cross, ((256, 3), (256, 3)), moved({0: 0}))
add("kron", torch.kron, ((32, 16), (8, 4)), any_of(first({0: 0, 1: 1})))
add(
    "multi_dot",
    lambda a, b, c: la.multi_dot([a, b, c]),
    ((64, 96), (96, 32), (32, 48)),
    letters("ab,bc,cd->ad"),
)
add("trace", torch.trace, ((256, 256),), first({0: "P", 1: "P"}))

# -- joins and cuts --------------------------------------------------------------------------------


def _half(case: Any) -> float:
    """Half of what a rank holds belongs to the other part, which is on other ranks."""
    given = zip(case.shapes, case.items, strict=True)
    return sum(torch.Size(shape).numel() * item for shape, item in given) * (case.n - 1) / case.n**2


VECTOR = (4096,)
add("cat vectors", lambda x, y: torch.cat((x, y)), (VECTOR, VECTOR), moved({0: 0}, {0: _half}))
add("split vector", lambda x: x.split(2048)[0], (VECTOR,), first({0: 0}, {0: _half}))
add("chunk qkv", lambda x: x.chunk(2, -1)[1], (X,), first({0: 0, 1: 1, 2: 2}, {2: _half}))
add("tensor_split", lambda x: x.tensor_split(2, 1)[0], (X,), first({0: 0, 1: 1, 2: 2}, {1: _half}))
# One row more: the border between two pieces moves by half of one.
add(
    "cache grows",
    lambda x, y: torch.cat((x, y), 2),
    (HEADS, ONE_ROW),
    any_of(moved({0: 0, 1: 1, 3: 3}), ways_of(((2, None), 2, rows_sent(2, 1)))),
)
add("repeat length", lambda x: x.repeat(1, 2, 1), (X,), first({0: 0, 2: 2}))
add("flatten, linear", lambda x, w: F.linear(x.flatten(1), w), ((16, 64, 32), (24, 2048)),
    ways_of(((0, None), 0), ((None, 0), 1), ((1, 1), "P")))  # fmt: skip

# -- writes ----------------------------------------------------------------------------------------

PLACES = ("int", 64, (8,))


def _write(x: Any, i: Any, v: Any) -> Any:
    y = x.clone()
    y[i] = v
    return y


_ROWS = ways_of(((0, None, None), 0), ((1, None, 1), 1), ((2, None, 2), 2))
# One row only: if an index comes twice, torch does not define which value is kept.
add("x[i] = v", _write, ((64, 16, 32), ("int", 64, (1,)), (1, 16, 32)), _ROWS)
add(
    "index_put add",
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    ((64, 16, 32), PLACES, (8, 16, 32)),
    _ROWS,
)
add("index_fill", lambda x, i: x.index_fill(1, i, 2.0), (X, PLACES), first({0: 0, 1: 1, 2: 2}))
add("select_scatter", lambda x, y: x.select_scatter(y, 1, 3), (X, (16, 256)),
    ways_of(((0, 0), 0), ((1, None), 1), ((2, 1), 2)))  # fmt: skip
add("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 8, 24), (X, (16, 16, 256)),
    ways_of(((0, 0), 0), ((1, None), 1), ((2, 2), 2)))  # fmt: skip

# -- windows ---------------------------------------------------------------------------------------


def _space(halo: float) -> Ways:
    return first({0: 0, 1: 1, 2: 2, 3: 3}, {2: rows_sent(2, halo), 3: rows_sent(3, halo)})


add("F.pad reflect", lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), (IMAGE,), pointwise)
add("F.pad circular", lambda x: F.pad(x, (1, 1, 1, 1), "circular"), (IMAGE,), _space(1))
add("F.avg_pool2d ceil", lambda x: F.avg_pool2d(x, 3, 2, 0, True), (IMAGE,), _space(1))
add(
    "F.max_pool2d indices",
    lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    (IMAGE,),
    _space(0),
)
add("F.adaptive_avg_pool2d 8", lambda x: F.adaptive_avg_pool2d(x, 8), (IMAGE,), _space(0))
add("F.adaptive_max_pool2d 8", lambda x: F.adaptive_max_pool2d(x, 8), (IMAGE,), _space(0))
add(
    "F.interpolate bicubic",
    lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    (IMAGE,),
    _space(2),
)
add("F.interpolate area", lambda x: F.interpolate(x, (16, 16), mode="area"), (IMAGE,), _space(0))
add(
    "F.interpolate half", lambda x: F.interpolate(x, (16, 16), mode="bilinear"), (IMAGE,), _space(0)
)
add(
    "F.fold", lambda x: F.fold(x, (32, 32), 4, stride=4), ((8, 256, 64),), first({0: 0, 1: 1, 2: 2})
)
add("F.lp_pool2d", lambda x: F.lp_pool2d(x.abs(), 2.0, 2), (IMAGE,), _space(0))
