"""Ops whose outputs look at a run of neighbours along a dim: with the dim split, a rank needs its
run and no more.

A ``Reach`` says which run. Convolution, pooling, resampling and windows look around a place (a
halo); slices, pads, rolls and flips look elsewhere; differences look one further. The form "window"
fetches the runs and runs the op on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec import S, piece
from .indexing import index_of
from .signature import Call, Signature

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Reach:
    """Which inputs along a dim the outputs ``[first, end)`` along ``place`` look at; beyond the
    ends is padding."""

    place: int
    ranges: Callable[[int, int], Ranges]


def windows(call: Call, parts: int, dims: Sequence[int]) -> list[Signature]:
    """Those of ``dims`` that may be split by the form: every rank has an output and an input of
    its own."""
    x, made = call.operands[0], []
    for d in dims:
        found = reach(call, d)
        if found is None:
            continue
        out, size = call.outs[0].shape[found.place], x.spec.placement.size
        if min(out, x.shape[d]) >= size:
            nbytes = _fetched(call, d, found, parts)
            outs = [S(found.place)] * len(call.outs)
            made.append(call.make({0: S(d)}, outs, "window", nbytes))
    return made


def clipped(ranges: Ranges, n: int) -> Ranges:
    """The parts of ``ranges`` that lie in ``[0, n)``."""
    inside = ((max(a, 0), min(b, n)) for a, b in ranges)
    return [(a, b) for a, b in inside if a < b]


def _fetched(call: Call, d: int, found: Reach, parts: int) -> int:
    """Bytes that the busiest rank gets from others."""
    x, m = call.operands[0], call.outs[0].shape[found.place]
    n, most = x.shape[d], 0
    for k in range(parts):
        start, size = piece(n, parts, k)
        first, count = piece(m, parts, k)
        wanted = clipped(found.ranges(first, first + count), n)
        own = clipped([(a - start, b - start) for a, b in wanted], size)
        most = max(most, sum(b - a for a, b in wanted) - sum(b - a for a, b in own))
    return most * x.spec.nbytes // max(1, n)


def reach(call: Call, d: int) -> Reach | None:
    """The reach of the op along dim ``d`` of its first operand; None if it has none that a run
    can serve."""
    find = _REACHES.get(call.name)
    return None if find is None else find(call, d)


# -- sliding windows: convolution, pooling, unfold -------------------------------------------------


def per_dim(value: Any, at: int, default: int = 0) -> int:
    """Of an int for all dims, or a list of one or one each, the one at ``at``."""
    if value is None or value == [] or value == ():
        return default
    if isinstance(value, int):
        return value
    return value[0] if len(value) == 1 else value[at]


def padding_at(call: Call, at: int) -> int | None:
    """Padding on either side along plane dim ``at``; None where the sides differ."""
    given = call.get("padding", 0)
    if given == "valid":
        return 0
    if given != "same":
        return per_dim(given, at)
    taps = call.get("weight").shape[2 + at] - 1
    total = per_dim(call.get("dilation", 1), at, 1) * taps
    return None if total % 2 else total // 2


def _sliding(stride: int, before: int, span: int) -> Callable[[int, int], Ranges]:
    return lambda o, e: [(o * stride - before, (e - 1) * stride - before + span)] if o < e else []


def _convolved(call: Call, d: int) -> Reach | None:
    x, weight = call.get("input"), call.get("weight")
    at = d - (x.ndim - weight.ndim + 2)
    if at < 0:
        return None
    pads = [padding_at(call, k) for k in range(weight.ndim - 2)]
    if None in pads:
        return None
    dilation = per_dim(call.get("dilation", 1), at, 1)
    span = dilation * (weight.shape[2 + at] - 1) + 1
    return Reach(d, _sliding(per_dim(call.get("stride", 1), at, 1), pads[at] or 0, span))


def _transposed(call: Call, d: int) -> Reach | None:
    x, weight = call.get("input"), call.get("weight")
    at, given = d - (x.ndim - weight.ndim + 2), call.get("output_padding", 0)
    if at < 0 or per_dim(given, at):
        return None
    stride, before = per_dim(call.get("stride", 1), at, 1), padding_at(call, at) or 0
    span = per_dim(call.get("dilation", 1), at, 1) * (weight.shape[2 + at] - 1)
    return Reach(
        d, lambda o, e: [(-((span - o - before) // stride), (e - 1 + before) // stride + 1)]
    )


def _pooled(count: int) -> Callable[[Call, int], Reach | None]:
    def find(call: Call, d: int) -> Reach | None:
        at = d - (call.operands[0].ndim - count)
        before = per_dim(call.get("padding", 0), at)
        if at < 0 or call.get("ceil_mode", False) or len(call.outs) > 1:
            return None
        if "count_include_pad" in call.params and not call.get("count_include_pad", True):
            return None
        kernel = per_dim(call.get("kernel_size"), at)
        stride = per_dim(call.get("stride"), at, kernel)
        dilation = per_dim(call.get("dilation", 1), at, 1) if "dilation" in call.params else 1
        return Reach(d, _sliding(stride, before, dilation * (kernel - 1) + 1))

    return find


def scales_of(call: Call) -> tuple[float, ...]:
    """The scales that an upsampling is given, a dim each; none where it is given sizes."""
    given = call.get("scales")
    return tuple(given) if isinstance(given, Sequence) else ()


def _resampled(count: int, halo: int) -> Callable[[Call, int], Reach | None]:
    """Enlarging by a whole number; the corners of smooth ones not aligned."""

    def find(call: Call, d: int) -> Reach | None:
        x, y = call.operands[0].shape, call.outs[0].shape
        at = d - (len(x) - count)
        if at < 0 or y[d] % max(1, x[d]) or y[d] < x[d] or (halo and call.get("align_corners")):
            return None
        factor, scales = y[d] // x[d], scales_of(call)
        if scales and scales[at] != factor:
            return None
        return Reach(d, lambda o, e: [(o // factor - halo, (e - 1) // factor + 1 + halo)])

    return find


def _unfolded(call: Call, d: int) -> Reach | None:
    if d != call.dim("dim"):
        return None
    return Reach(d, _sliding(call.get("step"), 0, call.get("size")))


# -- elsewhere: slices, pads, rolls, flips, differences --------------------------------------------


def _sliced(call: Call, d: int) -> Reach | None:
    index = index_of(call)
    if index.looks:
        return None
    for item in index.of("range"):
        if item.dim == d:
            return Reach(index.places[d], _sliding(item.step, -item.start, 1))
    return None


def pads_at(call: Call, d: int) -> tuple[int, int]:
    """What a pad adds before and after dim ``d``."""
    pad = call.get("pad")
    k = 2 * (call.operands[0].ndim - 1 - d)
    return (pad[k], pad[k + 1]) if k < len(pad) else (0, 0)


def _padded(call: Call, d: int) -> Reach | None:
    mode = call.get("mode", "constant") if "mode" in call.params else "constant"
    before = pads_at(call, d)[0]
    return Reach(d, lambda o, e: [(o - before, e - before)]) if mode == "constant" else None


def shifts(call: Call) -> dict[int, int]:
    """{dim: shift} of a roll; none where it rolls the flattened tensor."""
    if call.name in ("fft_fftshift", "fft_ifftshift"):
        back = call.name == "fft_ifftshift"
        return {d: (call.operands[0].shape[d] + back) // 2 for d in call.dims("dim")}
    given, by = call.get("dims"), call.get("shifts")
    if given is None or given == () or given == []:
        return {}
    dims, by = (v if isinstance(v, Sequence) else (v,) for v in (given, by))
    found: dict[int, int] = {}
    for d, shift in zip(dims, by, strict=True):
        d %= call.operands[0].ndim
        found[d] = found.get(d, 0) + shift
    return found


def _rolled(call: Call, d: int) -> Reach | None:
    by, n = shifts(call), call.operands[0].shape[d]
    if d not in by:
        return None

    def ranges(o: int, e: int) -> Ranges:
        a = (o - by[d]) % max(1, n)
        b = a + e - o
        return [(a, b)] if b <= n else [(a, n), (0, b - n)]

    return Reach(d, ranges)


def _flipped(call: Call, d: int) -> Reach | None:
    n = call.operands[0].shape[d]
    return Reach(d, lambda o, e: [(n - e, n - o)])


def _differenced(call: Call, d: int) -> Reach | None:
    order = call.get("n", 1)
    if d != call.dim("dim", -1) or len(call.operands) > 1 or order < 1:
        return None
    return Reach(d, lambda o, e: [(o, e + order)] if o < e else [])


_REACHES: dict[str, Callable[[Call, int], Reach | None]] = {
    "avg_pool1d": _pooled(1), "avg_pool2d": _pooled(2), "avg_pool3d": _pooled(3),
    "constant_pad_nd": _padded, "conv1d": _convolved, "conv2d": _convolved, "conv3d": _convolved,
    "conv_transpose1d": _transposed, "conv_transpose2d": _transposed,
    "conv_transpose3d": _transposed, "diff": _differenced, "fft_fftshift": _rolled,
    "fft_ifftshift": _rolled, "flip": _flipped, "getitem": _sliced,
    "max_pool1d": _pooled(1), "max_pool2d": _pooled(2), "max_pool3d": _pooled(3),
    "narrow": _sliced, "pad": _padded, "roll": _rolled, "slice": _sliced, "unfold": _unfolded,
    "upsample_bilinear2d": _resampled(2, 1), "upsample_linear1d": _resampled(1, 1),
    "upsample_nearest1d": _resampled(1, 0), "upsample_nearest2d": _resampled(2, 0),
    "upsample_nearest3d": _resampled(3, 0), "upsample_trilinear3d": _resampled(3, 1),
}  # fmt: skip
