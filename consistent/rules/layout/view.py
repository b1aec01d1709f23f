"""Rules of reshaping: which splits survive if elements keep their order and dims are regrouped.

Both shapes are divided into the smallest groups of dims with equal products. In a group only the
first dim that is not 1 can be split: its pieces are runs of elements, and so are those of the first
dim of the other shape. The runs are the same if both dims are cut at the same elements. On 3 ranks:

```
[6, 4] -> [24]    cuts of 6: 0 2 4, in elements 0 8 16;  cuts of 24: 0 8 16    S(0) -> S(0)
[5, 4] -> [20]    cuts of 5: 0 2 4, in elements 0 8 16;  cuts of 20: 0 7 14    by the form: ranks
                                       exchange the elements between the two cuts
```
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ...spec import B, P, S, Split, piece
from ..halo.halo import with_halo
from ..signature import Call, DoesNotFit, LocalShapes, Signature
from ..table import Row, Sizing, add_rows
from .cut_views import viewed

Shape = Sequence[int]


def groups(source: Shape, target: Shape) -> list[tuple[range, range]]:
    """Return the smallest pairs of dim ranges in both shapes that have equal products, in order.

    [6, 4, 5] -> [24, 5]: (dims 0 and 1, dim 0), (dim 2, dim 1). If a size is 0, products say
    nothing about which dims belong together, and the result ends before that group.
    """
    found, i, j = [], 0, 0
    while i < len(source) and j < len(target):
        i0, j0, a, b = i, j, source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(source):
                a, i = a * source[i], i + 1
            elif j < len(target):
                b, j = b * target[j], j + 1
            else:
                return found
        # A product of 0 says nothing about which dims belong together.
        if a == 0 and (i - i0, j - j0) != (1, 1):
            return found
        found.append((range(i0, i), range(j0, j)))
    return found


def heads(source: Shape, target: Shape) -> list[tuple[int, int, int, int]]:
    """Return (dim, its span, output dim, its span) for each group of ``groups`` that can be split.

    They are the first dims of the group in both shapes that are not 1. A span is the number of
    elements in one item of the dim: [6, 4] -> [24] gives (0, 4, 0, 1).
    """
    found = []
    for ins, outs in groups(source, target):
        i = next((d for d in ins if source[d] != 1), ins[0])
        o = next((d for d in outs if target[d] != 1), outs[0])
        if source[i] == 1 and len(ins) + len(outs) > 2:
            continue  # several dims of size 1: nothing says which is which
        spans = [
            math.prod(s[d + 1 : g[-1] + 1]) for s, d, g in ((source, i, ins), (target, o, outs))
        ]
        found.append((i, spans[0], o, spans[1]))
    return found


def cuts(n: int, parts: Sequence[int]) -> list[int]:
    """Return the starts of the pieces of ``n`` items that several axes split one after the other.

    ``parts`` are the numbers of ranks of the axes, outer axis first: 5 items, (2, 2) -> 0 2 3 4.
    """
    pieces = [(0, n)]
    for k in parts:
        pieces = [
            (start + offset, size)
            for start, m in pieces
            for offset, size in (piece(m, k, index) for index in range(k))
        ]
    return [start for start, _ in pieces]


def same_cuts(call: Call, d: int, span: int, m: int, out_span: int) -> bool:
    """Return whether ``call.axis`` may split dim ``d`` and the output's dim at the same elements.

    The output's dim has ``m`` items; ``span`` and ``out_span`` are the elements in an item of
    either dim. Axes that split one dim divide each other's pieces, so they are decided together: an
    axis may split the dims if, with any subset of the axes accepted before it, both dims are
    divided at the same elements. Axes that split ``d`` already are decided first, because data that
    is in place should stay.
    """
    x = call.operands[0]
    n, shape = x.shape[d], x.spec.placement.shape
    if n % math.prod(shape) == 0 and m % math.prod(shape) == 0:
        return True

    def agree(axes: tuple[int, ...]) -> bool:
        parts = [shape[axis] for axis in sorted(axes)]
        return [c * span for c in cuts(n, parts)] == [c * out_span for c in cuts(m, parts)]

    taken: tuple[int, ...] = ()
    for axis in sorted(range(len(shape)), key=lambda axis: x.spec.sbp[axis] != S(d)):
        subsets = (s for k in range(len(taken) + 1) for s in itertools.combinations(taken, k))
        if all(agree((*subset, axis)) for subset in subsets):
            taken += (axis,)
    return call.axis in taken


def _kept(call: Call) -> tuple[list[tuple[Split, Split]], list[int]]:
    """Return (splits that a view keeps, as (operand's, output's); dims that need an exchange).

    The dims are first dims of groups (see ``heads``) that the two shapes divide at different
    elements, so that ranks must exchange the elements between.
    """
    target = call.outs[0].shape
    kept, moved = [], []
    for i, span, o, out_span in heads(call.operands[0].shape, target):
        if same_cuts(call, i, span, target[o], out_span):
            kept.append((S(i), S(o)))
        else:
            moved.append(i)
    return kept, moved


def reshaped(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of a view or reshape: a split stays if ranks keep their elements.

    Only the first dim of each group of dims that are merged or divided can be split: on 3 ranks,
    [6, 4] -> [24] has ``S(0) -> S(0)``. If its pieces in the two shapes differ, ranks exchange the
    elements between them, by the form "halo".
    """
    if call.operands[0].spec.dtype != call.outs[0].dtype:
        raise DoesNotFit("a view of another dtype")
    kept, moved = _kept(call)
    made = [call.whole(), call.make({0: P}, P), *(call.make({0: s}, t) for s, t in kept)]
    made += _of_present(call, parts, [s.dim for s, _ in kept] + moved)
    return made + with_halo(call, parts, moved)


def _of_present(call: Call, parts: int, firsts: Sequence[int]) -> list[Signature]:
    """Return an SBP signature for the split that the operand has, if ``_kept`` does not give it.

    It is a split with a cut, or of a dim that is not the first of its group (not in ``firsts``).
    Each rank keeps its elements, and the output has a cut: [2, 8] -> [16] has ``S(1) -> S(0,
    of=8)``. The list is empty if there is no such split.
    """
    x, out = call.operands[0], call.outs[0]
    entry, found = x.spec.sbp[call.axis], call.cut_split()
    if found is None and (not isinstance(entry, Split) or entry.cut or entry.dim in firsts):
        return []
    assert isinstance(entry, Split)
    others = {e.dim for a, e in enumerate(x.spec.sbp) if a != call.axis and isinstance(e, Split)}
    if found is None and others.intersection(_group_of(entry.dim, x.shape, out.shape)):
        return []
    made = viewed(entry, groups(x.shape, out.shape), x.shape, out.shape, parts)
    return [] if made is None else [call.make({0: entry}, made, by_size=True)]


def _group_of(dim: int, source: Shape, target: Shape) -> range:
    """Return the dims of ``source`` that are in one group with ``dim``; empty if it is in none."""
    return next((ins for ins, _ in groups(source, target) if dim in ins), range(0))


def reshaped_as(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of reshape_as and view_as: those of reshape, with a second operand.

    Only the shape of the second operand is read. Where the output is split, the second operand is
    split in the same way, so that its shard has the local shape of the output. The second operand
    may also be P, as its values do not matter.
    """
    made = [call.whole(), call.make({0: P}, P), call.make({1: P}, B), call.make({0: P, 1: P}, P)]
    return made + [call.make({0: s, 1: t}, t) for s, t in _kept(call)[0]]


def repeated_in_place(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of repeat_interleave by a number: other dims stay split.

    The repeated dim stays split if the pieces of the result are those of the operand, repeated.
    Otherwise ranks fetch the elements that their piece of the result holds.
    """
    (x,) = call.take(1)
    made = [call.whole(), call.make({0: P}, P)]
    if call.get("dim") is None and x.ndim != 1:
        return made
    d = call.dim("dim", 0)
    made += [call.make({0: S(e)}, S(e)) for e in range(x.ndim) if e != d]
    repeats = call.get("repeats")
    if call.get("output_size") is None and same_cuts(call, d, repeats, call.outs[0].shape[d], 1):
        return [*made, call.make({0: S(d)}, S(d))]
    return made + with_halo(call, parts, [d])


def resized(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the arguments of ``op(x, *sizes)``, such as view, with the sizes of this rank's shard.

    ``ins`` and ``outs`` are the shapes of the shards of operands and outputs.
    """
    return (call.operands[0], tuple(outs[0])), {}


def _unflattened(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the arguments of unflatten with the sizes of this rank's shard."""
    d = call.dim("dim")
    count = len(outs[0]) - len(ins[0]) + 1
    return (call.operands[0], d, tuple(outs[0][d : d + count])), {}


ROWS = (
    Row(
        "_unsafe_view reshape view", reshaped, localize=resized, moves=True,
        numbers="*", any_size=True, sizing=Sizing.VIEW,
    ),
    # Any size: a dim of the result that is as long as the split dim is that dim, at all sizes.
    Row("flatten ravel", reshaped, moves=True, any_size=True),
    Row("repeat_interleave", repeated_in_place, "input repeats dim output_size", moves=True),
    Row("reshape_as view_as", reshaped_as, moves=True),
    # Composite, as decomposing it would not end: Tensor.unflatten is a Python function around a
    # builtin, which torch passes to the hook as Tensor.unflatten again.
    Row(
        "unflatten", reshaped, "input dim sizes",
        localize=_unflattened, composite=True, moves=True,
    ),
)  # fmt: skip

add_rows(ROWS)
