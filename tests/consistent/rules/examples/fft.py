"""Calls that prove the rows of consistent/rules/fft.py."""

from __future__ import annotations

import torch

from tests.brute_force import example
from tests.consistent.rules.examples.numbers import complex_, real

fft = torch.fft
_WINDOW = torch.hann_window(8, dtype=torch.float64)

_ONE_DIM = (
    example(fft.fft, real(5, 4)),
    example(fft.fft, complex_(5, 4, 3), 6, 1, "ortho"),
    example(fft.ifft, complex_(5, 4), dim=0),
    example(fft.rfft, real(4, 7)),
    example(fft.irfft, complex_(4, 5), 8),
    example(fft.hfft, complex_(4, 5)),
    example(fft.ihfft, real(4, 6)),
    example(fft.fft, real(2, 4)),
    example(fft.fft, real(7)),
)

_SEVERAL_DIMS = (
    example(fft.fft2, real(3, 4, 5)),
    example(fft.ifft2, complex_(3, 4, 5), None, (0, 1)),
    example(fft.rfft2, real(3, 4, 5)),
    example(fft.irfft2, complex_(3, 4, 5)),
    example(fft.hfft2, complex_(3, 4, 5)),
    example(fft.ihfft2, real(3, 4, 5)),
    example(fft.fftn, real(3, 4, 5)),
    example(fft.fftn, real(3, 4, 5), (6, 4)),
    example(fft.ifftn, complex_(3, 4, 5), dim=(0, 2)),
    example(fft.rfftn, real(3, 4, 5), dim=(1,)),
    example(fft.irfftn, complex_(3, 4, 5), dim=(1, 2), norm="forward"),
    example(fft.hfftn, complex_(3, 4, 5), dim=(1,)),
    example(fft.ihfftn, real(3, 4, 5), dim=(1, 2)),
)

_SHIFTS = (
    example(fft.fftshift, real(7, 6)),
    example(fft.fftshift, real(2, 7), 1),
    example(fft.ifftshift, real(7, 6)),
    example(fft.ifftshift, real(7, 6), (0,)),
)

_OVER_TIME = (
    example(
        torch._VF.stft, real(4, 20), 8, 4, 8, _WINDOW, False, True, True
    ),
    example(torch._VF.stft, real(20), 8, 4, 8, None, False, False, True),
)  # fmt: skip

EXAMPLES = (*_ONE_DIM, *_SEVERAL_DIMS, *_SHIFTS, *_OVER_TIME)
