"""Calls that prove the rows of consistent/rules/conv.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.numbers import real, unit, whole
from tests.torch_release import IS_2_13

nn = torch._C._nn

_CONVOLUTIONS = (
    example(torch.conv1d, real(5, 4, 6), real(7, 4, 3), real(7)),
    example(torch.conv1d, real(4, 6), real(7, 4, 3), real(7), padding=1),
    example(torch.conv2d, real(2, 5, 4, 5), real(7, 5, 3, 2), real(7), [2, 1], [1, 1], [1, 2]),
    example(torch.conv2d, real(4, 5, 4, 5), real(4, 5, 3, 2), None),
    example(torch.conv2d, real(4, 5, 5), real(6, 4, 3, 2), real(6)),
    example(torch.conv2d, real(2, 3, 4, 5), real(2, 3, 3, 2), real(2), padding="same"),
    example(torch.conv2d, real(2, 1, 4, 5), real(5, 1, 3, 2)),
    example(torch.conv2d, real(2, 12, 4, 5), real(24, 1, 3, 2), real(24), groups=12),
    example(torch.conv2d, real(2, 12, 4, 5), real(12, 2, 3, 2), real(12), 1, 0, 1, 6),
    example(torch.conv2d, real(2, 7, 4, 5), real(7, 1, 3, 2), real(7), groups=7),
    example(torch.conv2d, real(7, 4, 5), real(7, 1, 3, 2), groups=7),
    example(torch.conv2d, real(2, 7, 4, 5), real(14, 1, 3, 2), groups=7),
    example(torch.conv3d, real(2, 4, 3, 4, 3), real(5, 4, 2, 2, 2), real(5)),
    example(torch.conv_tbc, real(5, 4, 4), real(2, 4, 7), real(7)),
    example(torch.conv_transpose1d, real(5, 4, 6), real(4, 7, 3), real(7)),
    example(torch.conv_transpose2d, real(2, 5, 4, 3), real(5, 7, 3, 2), real(7), [2, 1], 1, [1, 0]),
    example(torch.conv_transpose2d, real(5, 4, 3), real(5, 4, 3, 2)),
    example(torch.conv_transpose2d, real(2, 12, 4, 3), real(12, 2, 3, 2), real(24), groups=12),
    example(torch.conv_transpose2d, real(2, 7, 4, 3), real(7, 1, 3, 2), real(7), groups=7),
    example(torch.conv_transpose3d, real(2, 4, 2, 3, 2), real(4, 5, 2, 2, 2), real(5)),
    example(
        torch.convolution,
        real(2, 5, 4, 5),
        real(7, 5, 3, 2),
        real(7),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    example(
        torch.convolution,
        real(2, 5, 4, 5),
        real(5, 7, 3, 2),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        True,
        [0, 0],
        1,
    ),
    *([example(
        torch._convolution, real(2, 5, 4), real(7, 5, 3), real(7), [1], [0], [1], False, [0], 1,
        False, False, False, False,
    )] if IS_2_13 else []),
)  # fmt: skip

# Where maxima of planes came from: each index once.
_INDICES_2D = whole(2, 4, 1, 1, low=0, high=3) + 4 * torch.arange(4).view(2, 2)
_INDICES_3D = whole(2, 4, 1, 1, 1, low=0, high=3) + 4 * torch.arange(2).view(1, 2, 1)

_PLANES = (
    example(nn.adaptive_avg_pool2d, real(5, 4, 5, 6), [2, 3]),
    example(torch._adaptive_avg_pool2d, real(5, 4, 5, 6), [2, 3]),
    example(torch._adaptive_avg_pool3d, real(5, 2, 3, 3, 4), [2, 1, 2]),
    *(  # since torch 2.13
        example(op, real(2, 5, 4, 6), [8, 3], False)
        for op in [getattr(nn, "_upsample_lanczos2d_aa", None)]
        if op is not None
    ),
    example(torch.adaptive_avg_pool1d, real(5, 4, 6), 3),
    example(nn.adaptive_avg_pool3d, real(4, 2, 3, 3, 4), [2, 1, 2]),
    example(torch.adaptive_max_pool1d, real(5, 4, 6), 3),
    example(nn.adaptive_max_pool2d, real(4, 5, 6), [2, 3]),
    example(nn.adaptive_max_pool3d, real(2, 4, 3, 3, 4), [2, 1, 2]),
    example(torch.avg_pool1d, real(5, 4, 6), 3),
    example(torch.avg_pool1d, real(4, 6), 3, 2, 1),
    example(nn.avg_pool2d, real(2, 5, 5, 6), 2, ceil_mode=True),
    example(nn.avg_pool2d, whole(2, 5, 5, 6), 2),
    example(nn.avg_pool3d, real(2, 4, 3, 3, 4), 2),
    example(torch.max_pool1d, real(5, 4, 6), 3),
    example(torch.max_pool1d_with_indices, real(5, 4, 6), 3),
    example(torch.max_pool2d, real(2, 4, 5, 6), 2),
    example(nn.max_pool2d_with_indices, real(5, 2, 5, 6), 2),
    example(nn.max_pool2d_with_indices, real(4, 5, 6), 2),
    example(nn.max_pool3d_with_indices, real(2, 4, 3, 3, 4), 2),
    example(nn.max_unpool2d, real(2, 4, 2, 2), _INDICES_2D, [4, 4]),
    example(nn.max_unpool3d, real(2, 4, 1, 2, 1), _INDICES_3D, [2, 4, 2], [2, 2, 2], [0, 0, 0]),
    example(nn.upsample_nearest1d, real(2, 4, 3), [5]),
    example(nn.upsample_linear1d, real(2, 4, 3), [5], True),
    example(nn._upsample_nearest_exact1d, real(2, 4, 3), None, [2.0]),
    example(nn.upsample_nearest2d, real(2, 4, 3, 2), None, [2.0, 1.5]),
    example(nn.upsample_bilinear2d, real(2, 4, 3, 2), [5, 4], False),
    example(nn.upsample_bicubic2d, real(4, 5, 3, 2), [5, 4], False),
    example(nn.upsample_bilinear2d, whole(2, 4, 3, 2, low=0, dtype=torch.uint8), [5, 4], False),
    example(nn._upsample_bilinear2d_aa, real(2, 4, 3, 4), [2, 3], False),
    example(nn._upsample_bicubic2d_aa, real(2, 4, 3, 4), [2, 3], False),
    example(nn._upsample_nearest_exact2d, real(2, 4, 3, 2), [5, 4]),
    example(nn.upsample_nearest3d, real(2, 4, 2, 3, 2), [3, 4, 2]),
    example(nn.upsample_trilinear3d, real(2, 4, 2, 3, 2), [3, 4, 2], True),
    example(nn._upsample_nearest_exact3d, real(2, 4, 2, 3, 2), [3, 4, 2]),
)  # fmt: skip

_MOVES = (
    example(torch.affine_grid_generator, real(4, 2, 3), [4, 2, 3, 5], True),
    example(torch.affine_grid_generator, real(2, 3, 4), [2, 2, 3, 4, 5], False),
    example(torch.channel_shuffle, real(5, 6, 4), 3),
    example(torch.native_channel_shuffle, real(2, 6, 4, 2), 2),
    example(nn.col2im, real(5, 8, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    example(nn.col2im, real(48, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    example(nn.im2col, real(5, 2, 3, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    example(nn.im2col, real(2, 12, 3, 4), [2, 2], [1, 1], [1, 1], [1, 1]),
    example(torch.grid_sampler_2d, real(5, 4, 3, 2), 2 * unit(5, 2, 2, 2) - 1, 0, 0, False),
    example(torch.grid_sampler_3d, real(5, 2, 3, 2, 2), 2 * unit(5, 2, 1, 2, 3) - 1, 0, 0, False),
    example(torch.grid_sampler, real(5, 4, 3, 4), 2 * unit(5, 4, 3, 2) - 1, 0, 0, False),
    example(torch.grid_sampler, real(2, 4, 3, 2, 3), 2 * unit(2, 4, 2, 3, 3) - 1, 0, 1, True),
    example(torch.pixel_shuffle, real(5, 8, 2, 3), 2),
    example(torch.pixel_shuffle, real(2, 48, 12, 5), 2),
    example(torch.pixel_unshuffle, real(2, 12, 24, 10), 2),
    example(torch.pixel_shuffle, real(2, 4, 4, 2, 3), 2),
    example(torch.pixel_unshuffle, real(5, 2, 4, 6), 2),
)

# Planes large enough to be split.
_SPLIT_PLANES = (
    example(torch.conv1d, real(2, 3, 9), real(4, 3, 3), real(4), padding=1),
    example(torch.conv1d, real(3, 7), real(4, 3, 3), None, 1, 2, 2),
    example(torch.conv1d, real(2, 3, 11), real(4, 3, 5), None, 2, "valid"),
    example(torch.conv2d, real(2, 3, 7, 8), real(4, 3, 3, 3), real(4), padding="same"),
    example(torch.conv2d, real(1, 4, 9, 8), real(4, 1, 3, 2), None, (2, 1), (1, 0), 1, 4),
    example(torch.conv2d, real(1, 2, 12, 12), real(3, 2, 2, 2), None, 2),
    example(torch.conv3d, real(1, 2, 5, 4, 4), real(2, 2, 3, 1, 2), None, 1, (1, 0, 1)),
    example(torch.conv_transpose1d, real(2, 3, 7), real(3, 4, 3), real(4), 2, 1),
    example(
        torch.conv_transpose2d, real(1, 3, 5, 4), real(3, 2, 4, 3), None, (3, 1), (1, 0), 0, 1, 2
    ),
    example(torch.max_pool1d, real(2, 9), 3, 2, 1),
    example(torch.max_pool2d, real(2, 3, 9, 7), 3, 2, 1),
    example(torch.max_pool2d, real(3, 12, 8), (3, 2)),
    example(torch.max_pool3d, real(1, 2, 4, 5, 6), 2, 1, 1, (1, 2, 1)),
    example(torch.avg_pool1d, real(2, 3, 9), 3, 2, 1),
    example(nn.avg_pool2d, real(2, 2, 8, 9), (2, 3), (1, 2), (1, 0)),
    example(nn.avg_pool2d, real(2, 2, 9, 9), 3, 2, 1, False, True, 5),
    example(nn.upsample_nearest1d, real(2, 3, 5), [10], None),
    example(nn.upsample_nearest2d, real(2, 3, 5, 4), None, [3.0, 2.0]),
    example(nn.upsample_bilinear2d, real(2, 3, 5, 4), [10, 12], False, None),
    example(nn.upsample_bilinear2d, real(2, 3, 4, 5), None, False, [2.0, 1.5]),
    example(torch.avg_pool1d, real(3, 9), 4, 3, 1, True),
    example(nn.avg_pool2d, real(2, 2, 8, 9), 3, 2, 1, True, False),
    example(nn.avg_pool2d, real(1, 2, 9, 8), 3, 2, 1, True, True),
    example(nn.avg_pool3d, real(1, 2, 5, 7, 4), 3, 2, 1, False, False),
    example(torch.max_pool2d, real(2, 3, 8, 9), 3, 2, 1, 1, True),
    example(nn.max_pool2d_with_indices, real(2, 3, 8, 9), 3, 2, 1, 1, True),
    example(nn.max_pool2d_with_indices, real(3, 9, 7), (3, 2), 1, (1, 0), 2),
    example(nn.max_pool3d_with_indices, real(1, 2, 5, 6, 4), 2, 1),
    example(torch.max_pool1d_with_indices, real(2, 9), 3, 2, 1),
    example(torch.adaptive_avg_pool1d, real(2, 3, 12), 4),
    example(nn.adaptive_avg_pool2d, real(2, 3, 8, 12), [4, 5]),
    example(nn.adaptive_max_pool2d, real(2, 3, 8, 12), [4, 6]),
    example(torch.adaptive_max_pool1d, real(3, 12), 6),
    example(nn.upsample_bicubic2d, real(2, 2, 5, 4), [10, 12], False),
    example(nn.upsample_bicubic2d, real(2, 2, 8, 12), [4, 4], False),
    example(nn.upsample_bilinear2d, real(2, 2, 10, 12), [5, 4], False),
    example(nn.upsample_nearest2d, real(2, 2, 10, 12), [5, 4]),
    example(nn._upsample_nearest_exact2d, real(2, 2, 10, 4), [5, 8]),
    example(nn._upsample_nearest_exact1d, real(2, 3, 4), None, [2.0]),
    example(nn._upsample_bilinear2d_aa, real(2, 2, 10, 12), [5, 4], False),
    example(nn._upsample_bicubic2d_aa, real(2, 2, 12, 4), [4, 8], False),
    example(nn._upsample_bicubic2d_aa, real(2, 2, 12, 15), [6, 5], False),
    example(nn.im2col, real(2, 3, 7, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
    example(nn.im2col, real(3, 8, 5), [3, 2], [2, 1], [1, 1], [2, 1]),
    example(nn.im2col, real(2, 2, 12, 8), [4, 4], [1, 1], [0, 0], [4, 4]),
    example(nn.col2im, real(2, 8, 24), [7, 5], [2, 2], [1, 1], [0, 0], [1, 1]),
    example(nn.col2im, real(18, 20), [8, 5], [3, 2], [1, 2], [1, 1], [2, 1]),
    example(nn.col2im, real(2, 4, 12), [9, 8], [2, 2], [1, 1], [0, 0], [3, 2]),
)

EXAMPLES = _CONVOLUTIONS + _PLANES + _MOVES + _SPLIT_PLANES
