"""Fourier transforms: linear, whole along the dims they act on, split along all others.

A transform along a split dim has its input moved to a split of another dim (an all-to-all), or
padded with zeros to P where there is none. Torch refuses empty transforms, so a dim is split only
where every rank gets a part.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..spec import P, S
from .runs import shifts
from .signature import Call, Signature
from .table import Row, add_rows
from .window import windows


def _apart(call: Call, acted: Iterable[int]) -> list[Signature]:
    """All dims but ``acted`` may be split."""
    x, acted = call.operands[0], set(acted)
    free = [d for d in range(x.ndim) if d not in acted and x.shape[d] >= x.spec.placement.size]
    return call.same(free, partial=True)


def one_dim(call: Call, parts: int) -> list[Signature]:
    """fft and its kin along one dim, the last by default."""
    return _apart(call, [call.dim("dim", -1)])


def plane(call: Call, parts: int) -> list[Signature]:
    """fft2 and its kin: the last two dims by default."""
    return _apart(call, call.dims("dim", (-2, -1)))


def space(call: Call, parts: int) -> list[Signature]:
    """fftn and its kin: all dims by default, or the last of which sizes are given."""
    sizes, n = call.get("s"), call.operands[0].ndim
    given = call.get("dim")
    if given is None and sizes is not None:
        return _apart(call, range(n - len(sizes), n))
    return _apart(call, call.dims("dim"))


def shifted(call: Call, parts: int) -> list[Signature]:
    """fftshift, ifftshift: rolls by half of a dim, which need no whole dims."""
    acted = shifts(call)
    free = [d for d in range(call.operands[0].ndim) if d not in acted]
    return call.same(free, partial=True) + windows(call, parts, list(acted))


def windowed(call: Call, parts: int) -> list[Signature]:
    """stft ``b[t], [w] -> b[fn]``, linear in the signal."""
    x, made = call.operands[0], [call.whole(), call.make({0: P}, P)]
    if x.ndim == 2 and x.shape[0] >= x.spec.placement.size:
        made.append(call.make({0: S(0)}, S(0)))
    return made


_ONE = "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft"
_TWO = "fft_fft2 fft_hfft2 fft_ifft2 fft_ihfft2 fft_irfft2 fft_rfft2"
_ALL = "fft_fftn fft_hfftn fft_ifftn fft_ihfftn fft_irfftn fft_rfftn"

ROWS = (
    Row(_ALL, space, "input s dim norm"),
    Row(_ONE, one_dim, "input n dim norm"),
    Row(_TWO, plane, "input s dim norm"),
    Row("fft_fftshift fft_ifftshift", shifted, "input dim"),
    Row("stft", windowed),
)

add_rows(ROWS)
