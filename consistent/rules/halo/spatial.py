"""Halos of ops on images along one of their dims: convolution, pooling, resampling, im2col."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..signature import Call
from .halo import HALOS, Halo, Ranges


def per_dim(value: Any, image_dim: int, default: int = 0) -> int:
    """Return the entry for ``image_dim`` of an argument such as ``stride``: (2, 3) at 1 -> 3.

    The argument is an int or a list of one int, for all dims, or a list of one int per dim. If it
    is None or empty, the result is ``default``.
    """
    if value is None or value == [] or value == ():
        return default
    if isinstance(value, int):
        return value
    return value[0] if len(value) == 1 else value[image_dim]


def padding_of(call: Call, image_dim: int) -> int | None:
    """Return the padding on either side along ``image_dim``; None if the sides differ.

    They may differ if ``padding`` is "same" and the kernel has an even size.
    """
    padding = call.get("padding", 0)
    if padding == "valid":
        return 0
    if padding != "same":
        return per_dim(padding, image_dim)
    taps = call.get("weight").shape[2 + image_dim] - 1
    total = per_dim(call.get("dilation", 1), image_dim, 1) * taps
    return None if total % 2 else total // 2


def window_ranges(stride: int, before: int, span: int) -> Callable[[int, int], Ranges]:
    """Return the ``ranges`` of a ``Halo`` for an op whose outputs are windows over the input.

    Output k reads ``span`` inputs from ``k * stride - before`` on. ``before`` is the padding.
    """
    return lambda o, e: [(o * stride - before, (e - 1) * stride - before + span)] if o < e else []


def _convolution_halo(call: Call, d: int) -> Halo | None:
    x, weight = call.get("input"), call.get("weight")
    image_dim = d - (x.ndim - weight.ndim + 2)
    if image_dim < 0:
        return None
    pads = [padding_of(call, k) for k in range(weight.ndim - 2)]
    if None in pads:
        return None
    dilation = per_dim(call.get("dilation", 1), image_dim, 1)
    span = dilation * (weight.shape[2 + image_dim] - 1) + 1
    return Halo(
        d, window_ranges(per_dim(call.get("stride", 1), image_dim, 1), pads[image_dim] or 0, span)
    )


def _conv_transpose_halo(call: Call, d: int) -> Halo | None:
    x, weight = call.get("input"), call.get("weight")
    image_dim, output_padding = d - (x.ndim - weight.ndim + 2), call.get("output_padding", 0)
    if image_dim < 0 or per_dim(output_padding, image_dim):
        return None
    stride, before = per_dim(call.get("stride", 1), image_dim, 1), padding_of(call, image_dim) or 0
    span = per_dim(call.get("dilation", 1), image_dim, 1) * (weight.shape[2 + image_dim] - 1)
    # The inputs whose windows reach an output: the first one rounds up, the last one down.
    return Halo(
        d, lambda o, e: [(-((span - o - before) // stride), (e - 1 + before) // stride + 1)]
    )


def pool_window(call: Call, image_dim: int) -> tuple[int, int, int, int]:
    """Return (kernel, stride, padding, dilation) of a pooling op along ``image_dim``.

    The stride is the size of the kernel if the call gives none.
    """
    kernel = per_dim(call.get("kernel_size"), image_dim)
    dilation = per_dim(call.get("dilation", 1), image_dim, 1) if "dilation" in call.params else 1
    stride = per_dim(call.get("stride"), image_dim, kernel)
    return kernel, stride, per_dim(call.get("padding", 0), image_dim), dilation


def _pooling_halo(count: int) -> Callable[[Call, int], Halo | None]:
    def find_halo(call: Call, d: int) -> Halo | None:
        image_dim = d - (call.operands[0].ndim - count)
        if image_dim < 0:
            return None
        kernel, stride, before, dilation = pool_window(call, image_dim)
        return Halo(d, window_ranges(stride, before, dilation * (kernel - 1) + 1))

    return find_halo


def _adaptive_pooling_halo(count: int) -> Callable[[Call, int], Halo | None]:
    """Return a function that finds the halo of adaptive pooling along a dim.

    There is one if all windows have one size: n inputs to m outputs, with n a multiple of m.
    ``count`` is the number of image dims.
    """

    def find_halo(call: Call, d: int) -> Halo | None:
        n, m = call.operands[0].shape[d], call.outs[0].shape[d]
        if d < call.operands[0].ndim - count or m == 0 or n % m:
            return None
        return Halo(d, window_ranges(n // m, 0, n // m))

    return find_halo


def scale_arguments(call: Call) -> tuple[float | None, ...]:
    """Return the scale factors of an upsampling, one per image dim.

    They are in the argument ``scales``, as a list or one by one. Empty if the call has only sizes.
    """
    scales = call.get("scales")
    if isinstance(scales, Sequence):
        return tuple(scales)
    return tuple(call.args[call.params.index("scales") :])


def resampling_factors(n: int, m: int) -> tuple[int, int] | None:
    """Return the whole factors (up, down) from n inputs to m outputs, or None if there are none.

    4 to 8 -> (2, 1); 8 to 4 -> (1, 2); 4 to 6 -> None.
    """
    if n == 0 or m == 0 or (m % n and n % m):
        return None
    return (m // n, 1) if m % n == 0 else (1, n // m)


def _resampling_halo(count: int, up: int, down: int) -> Callable[[Call, int], Halo | None]:
    """Return a function that finds the halo of resampling by a whole factor along a dim.

    There is none for other factors, or with ``align_corners``.

    Args:
        count: the number of image dims.
        up: for an enlarged image, how many inputs on either side of its own input an output needs.
        down: for a reduced one, the inputs of how many neighbouring outputs it needs on either
            side.
    """

    def find_halo(call: Call, d: int) -> Halo | None:
        n, m = call.operands[0].shape[d], call.outs[0].shape[d]
        image_dim, factors, scales = (
            d - (call.operands[0].ndim - count),
            resampling_factors(n, m),
            scale_arguments(call),
        )
        if image_dim < 0 or factors is None:
            return None
        if "align_corners" in call.params and call.get("align_corners"):
            return None
        growth, shrinkage = factors
        if image_dim < len(scales) and scales[image_dim] not in (None, growth / shrinkage):
            return None
        if shrinkage > 1:
            return Halo(d, lambda o, e: [((o - down) * shrinkage, (e + down) * shrinkage)])
        return Halo(d, lambda o, e: [(o // growth - up, (e - 1) // growth + 1 + up)])

    return find_halo


def block_grid(call: Call) -> tuple[int, int]:
    """Return (rows, columns) of the grid of blocks that im2col and col2im slide over the image."""
    image = call.operands[0].shape[-2:] if call.name == "im2col" else call.get("output_size")
    grid = []
    for image_dim, n in enumerate(image):
        stride, before, span = block_window(call, image_dim)
        grid.append((n + 2 * before - span) // stride + 1)
    return grid[0], grid[1]


def block_window(call: Call, image_dim: int) -> tuple[int, int, int]:
    """Return (stride, padding, span) of the blocks of im2col along ``image_dim``.

    A block reaches over ``span`` pixels: ``dilation * (kernel_size - 1) + 1``.
    """
    taps = per_dim(call.get("kernel_size"), image_dim) - 1
    span = per_dim(call.get("dilation", 1), image_dim, 1) * taps + 1
    return (
        per_dim(call.get("stride", 1), image_dim, 1),
        per_dim(call.get("padding", 0), image_dim),
        span,
    )


def _im2col_halo(call: Call, d: int) -> Halo | None:
    """Return the halo of im2col along image rows: a rank needs the rows of its blocks.

    Each column of the result is a block. Blocks are in row-major order, so a rank's columns lie in
    a range of rows of blocks.
    """
    x = call.operands[0]
    if d != x.ndim - 2:
        return None
    width, block_ranges = block_grid(call)[1], window_ranges(*block_window(call, 0))
    return Halo(x.ndim - 2, lambda o, e: block_ranges(o // width, (e - 1) // width + 1))


def _col2im_halo(call: Call, d: int) -> Halo | None:
    """Return the halo of col2im along its columns: image rows need the blocks that reach them."""
    x = call.operands[0]
    if d != x.ndim - 1:
        return None
    (rows, width), (stride, before, span) = block_grid(call), block_window(call, 0)

    def ranges(o: int, e: int) -> Ranges:
        first = max(0, -((span - 1 - o - before) // stride))
        return [(first * width, min(rows, (e - 1 + before) // stride + 1) * width)]

    return Halo(x.ndim - 1, ranges)


# Mode -> (up, down) of ``_resampling_halo``: without and with antialiasing.
_REACH = {"linear": (1, 0), "bilinear": (1, 0), "trilinear": (1, 0), "bicubic": (2, 1)}
_ANTIALIASED_REACH = {"bilinear": (2, 1), "bicubic": (3, 2), "lanczos": (4, 3)}

HALOS.update(
    {
        "col2im": _col2im_halo, "im2col": _im2col_halo,
        **{f"conv{k}d": _convolution_halo for k in (1, 2, 3)},
        **{f"conv_transpose{k}d": _conv_transpose_halo for k in (1, 2, 3)},
        **{f"{kind}_pool{k}d": _pooling_halo(k) for kind in ("avg", "max") for k in (1, 2, 3)},
        **{f"max_pool{k}d_with_indices": _pooling_halo(k) for k in (1, 2, 3)},
        **{
            f"adaptive_{kind}_pool{k}d": _adaptive_pooling_halo(k)
            for kind in ("avg", "max") for k in (1, 2, 3)
        },
        **{f"upsample_nearest{k}d": _resampling_halo(k, 0, 0) for k in (1, 2, 3)},
        **{f"_upsample_nearest_exact{k}d": _resampling_halo(k, 0, 0) for k in (1, 2, 3)},
        "upsample_linear1d": _resampling_halo(1, *_REACH["linear"]),
        "upsample_trilinear3d": _resampling_halo(3, *_REACH["trilinear"]),
        **{
            f"upsample_{kind}2d": _resampling_halo(2, *_REACH[kind])
            for kind in ("bilinear", "bicubic")
        },
        **{
            f"_upsample_{kind}2d_aa": _resampling_halo(2, *halo)
            for kind, halo in _ANTIALIASED_REACH.items()
        },
    }
)  # fmt: skip
