"""Rules of Fourier transforms: linear, and split along the dims that are not transformed.

For a transform along a split dim the input is boxed to a split of another dim (an all-to-all), or,
if there is none, padded with zeros to P. Torch refuses empty transforms, so a dim is split only if
every rank gets a part.
"""

from __future__ import annotations

from ...signature import Call, as_dims
from ...table import Row, add_rows


def transformed_dims(call: Call) -> tuple[int, ...] | None:
    """Return the dims that fftn, ... transform; None stands for all.

    They are those of ``dim``, or else the last ones, one for each size in ``s``, or else all.
    """
    sizes, n = call.get("s"), call.operands[0].ndim
    if call.get("dim") is None and sizes is not None:
        return tuple(range(n - len(sizes), n))
    return as_dims(call.get("dim"))


_FFT_1D = "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft"
_FFT_2D = "fft_fft2 fft_hfft2 fft_ifft2 fft_ihfft2 fft_irfft2 fft_rfft2"
_FFT_ND = "fft_fftn fft_hfftn fft_ifftn fft_ihfftn fft_irfftn fft_rfftn"
_FFT_RULE = "...![D] -> ...![E]"

ROWS = (
    Row(_FFT_ND, _FFT_RULE, "input s dim norm", along=transformed_dims),
    Row(_FFT_1D, _FFT_RULE, "input n dim=-1 norm"),
    Row(_FFT_2D, _FFT_RULE, "input s dim=(-2,-1) norm"),
    Row("fft_fftshift fft_ifftshift", "...<D> -> ...<D>; moves", "input dim"),
    Row(
        "stft",
        ("n![t], f(window:[w]) -> n!_", "[t], f(window:[w]) -> _"),
        "input n_fft hop_length win_length window",
    ),
)

add_rows(ROWS)
