"""Halos: the inputs beyond its shard that a rank needs for its outputs along a split dim.

A rank fetches the inputs that its outputs need, and no more. Convolution, pooling and resampling
look around a position (``spatial.py``); slices, pads, rolls, repeats and regrouped dims look
elsewhere (``layout/halos.py``). The form "halo" fetches the inputs and runs the op on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...spec import S, piece
from ..signature import Call, Operand, Signature

FORM = "halo"
Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Halo:
    """Inputs that given outputs of an op need along a split dim.

    A 1-d convolution with 3 taps and padding 1 needs the inputs ``[first - 1, end + 1)`` for the
    outputs ``[first, end)``. A rank fetches those that are not in its own shard.

    Args:
        out_dim: the dim of the output that the input's dim becomes.
        ranges: (first, end) -> the ranges (start, end) of inputs that the outputs ``[first, end)``
            need; positions beyond the ends of the dim are padding.
    """

    out_dim: int
    ranges: Callable[[int, int], Ranges]


def with_halo(call: Call, parts: int, dims: Sequence[int]) -> list[Signature]:
    """Return the SBP signatures of the form "halo" that split one of ``dims`` of the first operand.

    Each rank fetches the inputs that its outputs need from other ranks. A dim is split only if
    every rank has an output and an input of its own, and if the op has a halo along it.
    """
    x, signatures = call.operands[0], []
    for d in dims:
        halo = halo_of(call, d)
        if halo is None:
            continue
        out, size = call.outs[0].shape[halo.out_dim], x.spec.placement.size
        if min(out, x.shape[d]) >= size:
            nbytes = max_fetched_bytes(x, d, out, halo.ranges, parts)
            outs = [S(halo.out_dim)] * len(call.outs)
            signatures.append(call.new_signature({0: S(d)}, outs, FORM, nbytes, by_size=True))
    return signatures


def clip_ranges(ranges: Ranges, n: int) -> Ranges:
    """Return the parts of ``ranges`` within ``[0, n)``, without the padding beyond the ends.

    ``[(-1, 3)]`` -> ``[(0, 3)]``. Empty ranges are left out.
    """
    inside = ((max(a, 0), min(b, n)) for a, b in ranges)
    return [(a, b) for a, b in inside if a < b]


def max_fetched_bytes(
    x: Operand, d: int, m: int, ranges: Callable[[int, int], Ranges], parts: int
) -> int:
    """Return the most bytes that a rank fetches from others if ``parts`` ranks split ``m`` outputs.

    ``ranges`` are those of a ``Halo`` along dim ``d`` of ``x``.
    """
    return max(fetched_bytes_by_rank(x, d, m, ranges, parts))


def fetched_bytes_by_rank(
    x: Operand, d: int, m: int, ranges: Callable[[int, int], Ranges], parts: int
) -> list[int]:
    """Return the bytes that each of ``parts`` ranks fetches if they split ``m`` outputs.

    A rank has its balanced piece of dim ``d`` of ``x``, and fetches what else its outputs need.
    ``ranges`` are those of a ``Halo`` along that dim.
    """
    n, nbytes_by_rank = x.shape[d], []
    for k in range(parts):
        start, size = piece(n, parts, k)
        first, count = piece(m, parts, k)
        needed = clip_ranges(ranges(first, first + count), n)
        own = clip_ranges([(a - start, b - start) for a, b in needed], size)
        missing = sum(b - a for a, b in needed) - sum(b - a for a, b in own)
        nbytes_by_rank.append(missing * x.spec.nbytes // max(1, n))
    return nbytes_by_rank


def halo_of(call: Call, d: int) -> Halo | None:
    """Return which inputs along dim ``d`` of its first operand an op needs for its outputs.

    None if they are not a few ranges of inputs: the dim is then not split by the form "halo".
    """
    find_halo = HALOS.get(call.name)
    return None if find_halo is None else find_halo(call, d)


# Op name -> (call, dim) -> its halo.
HALOS: dict[str, Callable[[Call, int], Halo | None]] = {}
