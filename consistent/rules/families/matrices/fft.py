"""Rules of Fourier transforms: linear, and split along the dims that are not transformed.

For a transform along a split dim the input is boxed to a split of another dim (an all-to-all), or,
if there is none, padded with zeros to P. Torch refuses empty transforms, so a dim is split only if
every rank gets a part.
"""

from __future__ import annotations

from ...signature import Call, dims_given
from ...table import Row, add_rows


def space(call: Call) -> tuple[int, ...] | None:
    """Return the dims that fftn, ... transform; None stands for all.

    They are those of ``dim``, or else the last ones, one for each size in ``s``, or else all.
    """
    sizes, n = call.get("s"), call.operands[0].ndim
    if call.get("dim") is None and sizes is not None:
        return tuple(range(n - len(sizes), n))
    return dims_given(call.get("dim"))


_ONE = "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft"
_TWO = "fft_fft2 fft_hfft2 fft_ifft2 fft_ihfft2 fft_irfft2 fft_rfft2"
_ALL = "fft_fftn fft_hfftn fft_ifftn fft_ihfftn fft_irfftn fft_rfftn"
_ALONG = "...![D] -> ...![E]"

ROWS = (
    Row(_ALL, _ALONG, "input s dim norm", along=space),
    Row(_ONE, _ALONG, "input n dim=-1 norm"),
    Row(_TWO, _ALONG, "input s dim=(-2,-1) norm"),
    Row("fft_fftshift fft_ifftshift", "...<D> -> ...<D>; moves", "input dim"),
    Row(
        "stft",
        ("n![t], f(window:[w]) -> n!_", "[t], f(window:[w]) -> _"),
        "input n_fft hop_length win_length window",
    ),
)

add_rows(ROWS)
