"""Ops whose outputs look at a run of neighbours along a dim: with the dim split, a rank needs its
run and no more.

A ``Reach`` says which run. Convolution, pooling, resampling look around a place (``planes.py``);
slices, pads, rolls, repeats and regrouped dims look elsewhere (``runs.py``). The form "window"
fetches the runs and runs the op on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..spec import S, piece
from .signature import Call, Operand, Signature

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
            nbytes = fetched_bytes(x, d, out, found.ranges, parts)
            outs = [S(found.place)] * len(call.outs)
            made.append(call.make({0: S(d)}, outs, "window", nbytes))
    return made


def clipped(ranges: Ranges, n: int) -> Ranges:
    """The parts of ``ranges`` that lie in ``[0, n)``."""
    inside = ((max(a, 0), min(b, n)) for a, b in ranges)
    return [(a, b) for a, b in inside if a < b]


def fetched_bytes(
    x: Operand, d: int, m: int, ranges: Callable[[int, int], Ranges], parts: int
) -> int:
    """Bytes that the busiest rank gets from others, where outputs are cut from ``m``."""
    n, most = x.shape[d], 0
    for k in range(parts):
        start, size = piece(n, parts, k)
        first, count = piece(m, parts, k)
        wanted = clipped(ranges(first, first + count), n)
        own = clipped([(a - start, b - start) for a, b in wanted], size)
        most = max(most, sum(b - a for a, b in wanted) - sum(b - a for a, b in own))
    return most * x.spec.nbytes // max(1, n)


def reach(call: Call, d: int) -> Reach | None:
    """The reach of the op along dim ``d`` of its first operand; None if it has none that a run
    can serve."""
    find = REACHES.get(call.name)
    return None if find is None else find(call, d)


# Op name -> (call, dim) -> its reach.
REACHES: dict[str, Callable[[Call, int], Reach | None]] = {}
