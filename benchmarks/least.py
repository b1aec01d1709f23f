"""The least bytes that the mathematics of an op needs for a layout of its inputs. op_bytes.py
prints this bound.

A *way* is one right way to run an op on one axis of n ranks: where each input lies (a dim, or None
for B), where the result lies (a dim, None, or "P" for a sum still to be made), and the bytes that
each rank must send in the op. Each family of ops lists its ways with the reason for what they send.
The least of a call is the cost of its cheapest way, where

    an input of t bytes, brought where the way wants it, costs
        S -> B  (n-1)/n t        S(i) -> S(j)  (n-1)/n^2 t        B -> S  0
    a result P of t bytes costs the reduction that makes it usable
        (n-1)/n t to split it, or 2 (n-1)/n t where it has no dim

Pieces are even. A reduction that is not a sum (a maximum, a sum of squares under a root) costs the
same as P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Entry = int | str | None
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """The sizes of a call: shapes and item sizes of its tensor inputs and of its first output."""

    shapes: tuple[Shape, ...]
    items: tuple[int, ...]
    out: Shape
    out_item: int
    n: int

    @property
    def out_bytes(self) -> int:
        return math.prod(self.out) * self.out_item

    def scattered(self, nbytes: float, ndim: int = 1) -> float:
        """Bytes to reduce ``nbytes`` so that each rank gets a part (all of it if there is no dim to
        split)."""
        return (2 if ndim == 0 else 1) * (self.n - 1) / self.n * nbytes

    def everywhere(self, nbytes: float) -> float:
        """Bytes to reduce ``nbytes`` for every rank."""
        return 2 * (self.n - 1) / self.n * nbytes


@dataclass(frozen=True)
class Way:
    """How the inputs and the result lie, and the bytes sent in the op."""

    ins: tuple[Entry, ...]
    out: Entry
    sends: float = 0.0


Ways = Callable[[Case], Iterator[Way]]


def least(ways: Ways, case: Case, layout: Sequence[int | None]) -> float:
    """Bytes of the cheapest way from ``layout``."""
    return min(_cost(way, case, layout) for way in (_whole(case), *ways(case)))


def _whole(case: Case) -> Way:
    return Way((None,) * len(case.shapes), None)


def _cost(way: Way, case: Case, layout: Sequence[int | None]) -> float:
    n, total = case.n, way.sends
    for have, want, shape, item in zip(layout, way.ins, case.shapes, case.items, strict=True):
        t = math.prod(shape) * item
        if have is None or have == want or want == "P":
            continue
        total += t * (n - 1) / n if want is None else t * (n - 1) / n**2
    return total + (case.scattered(case.out_bytes, len(case.out)) if way.out == "P" else 0)


# -- families --------------------------------------------------------------------------------------


def pointwise(case: Case) -> Iterator[Way]:
    """Element by element: a dim split in all inputs that have it is split in the result."""
    rank = len(case.out)
    for d in range(rank):
        ins: list[Entry] = []
        for shape in case.shapes:
            own = d - (rank - len(shape))
            ins.append(own if own >= 0 and shape[own] > 1 else None)
        yield Way(tuple(ins), d)


def letters(rule: str) -> Ways:
    """Sums of products: a letter of the result may be split; one that is summed away leaves P."""
    left, right = rule.split("->")
    terms = left.split(",")

    def ways(case: Case) -> Iterator[Way]:
        for letter in sorted(set(left) - {","}):
            ins = tuple(term.index(letter) if letter in term else None for term in terms)
            yield Way(ins, right.index(letter) if letter in right else "P")

    return ways


def reduction(*dims: int, keep: bool = False, numbers: float = 1, linear: bool = True) -> Ways:
    """A reduction over ``dims``: a split of one of them gives a P, of ``numbers`` times the size of
    the result if it takes more than a sum (an index beside a maximum, a mean beside a variance)."""

    def ways(case: Case) -> Iterator[Way]:
        rank = len(case.shapes[0])
        gone = {d % rank for d in dims} or set(range(rank))
        kept = [d for d in range(rank) if d not in gone]
        rest = (None,) * (len(case.shapes) - 1)
        for d in range(rank):
            if d in gone:
                if linear:
                    yield Way((d, *rest), "P")
                else:
                    yield Way(
                        (d, *rest), None, case.scattered(numbers * case.out_bytes, len(case.out))
                    )
            else:
                yield Way((d, *rest), d if keep else kept.index(d))

    return ways


def along(
    *dims: int, numbers: float | None = None, per: Callable[[Case], float] | None = None
) -> Ways:
    """The result has the input's shape, and ``dims`` belong together. A split of one of them needs
    ``numbers`` statistics of every row on every rank (a softmax: the local logsumexp), or
    ``per(case)`` bytes, or is impossible (a sort). Further inputs, such as weights, have the last
    of the dims."""

    def ways(case: Case) -> Iterator[Way]:
        shape = case.shapes[0]
        rank = len(shape)
        own = {d % rank for d in dims}
        rows = math.prod(n for d, n in enumerate(shape) if d not in own) * case.items[0]
        for d in range(rank):
            rest = tuple(
                len(s) - (rank - d) if len(s) >= rank - d and d in own else None
                for s in case.shapes[1:]
            )
            if d not in own:
                yield Way((d, *rest), d)
            elif per is not None:
                yield Way((d, *rest), d, per(case))
            elif numbers is not None:
                yield Way((d, *rest), d, case.everywhere(numbers * rows))

    return ways


def moved(
    places: dict[int, int | str], sends: dict[int, Callable[[Case], float]] | None = None
) -> Ways:
    """All inputs are split along d; the result is then split along ``places[d]``, or P.
    ``sends[d]`` are the bytes of pieces that move to other ranks."""

    def ways(case: Case) -> Iterator[Way]:
        for d, out in places.items():
            extra = sends[d](case) if sends and d in sends else 0.0
            yield Way((d,) * len(case.shapes), out, extra)

    return ways


def first(
    places: dict[int, int | str], sends: dict[int, Callable[[Case], float]] | None = None
) -> Ways:
    """The same with the first input split and the others whole."""

    def ways(case: Case) -> Iterator[Way]:
        for d, out in places.items():
            extra = sends[d](case) if sends and d in sends else 0.0
            yield Way((d,) + (None,) * (len(case.shapes) - 1), out, extra)

    return ways


def any_of(*families: Ways) -> Ways:
    """The ways of all families."""

    def ways(case: Case) -> Iterator[Way]:
        for family in families:
            yield from family(case)

    return ways


def ways_of(
    *listed: tuple[tuple[Entry, ...], Entry] | tuple[tuple[Entry, ...], Entry, Any],
) -> Ways:
    """Ways given one by one: (inputs, result[, bytes sent as a function of the case])."""

    def ways(case: Case) -> Iterator[Way]:
        for ins, out, *sends in listed:
            yield Way(ins, out, sends[0](case) if sends else 0.0)

    return ways


def rows_sent(dim: int, count: float) -> Callable[[Case], float]:
    """``count`` slices of the first input along ``dim``: a halo, a carry, a shift of the border
    between two pieces."""
    return lambda case: count * math.prod(case.shapes[0]) // case.shapes[0][dim] * case.items[0]
