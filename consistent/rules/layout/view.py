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
from .cut_views import split_of_view

Shape = Sequence[int]


def dim_groups(source: Shape, target: Shape) -> list[tuple[range, range]]:
    """Return the smallest pairs of dim ranges in both shapes that have equal products, in order.

    [6, 4, 5] -> [24, 5]: (dims 0 and 1, dim 0), (dim 2, dim 1). If a size is 0, products say
    nothing about which dims belong together, and the result ends before that group.
    """
    pairs, i, j = [], 0, 0
    while i < len(source) and j < len(target):
        i0, j0, a, b = i, j, source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(source):
                a, i = a * source[i], i + 1
            elif j < len(target):
                b, j = b * target[j], j + 1
            else:
                return pairs
        # A product of 0 says nothing about which dims belong together.
        if a == 0 and (i - i0, j - j0) != (1, 1):
            return pairs
        pairs.append((range(i0, i), range(j0, j)))
    return pairs


def splittable_dims(source: Shape, target: Shape) -> list[tuple[int, int, int, int]]:
    """Return (dim, its span, output dim, its span) for each of ``dim_groups`` that can be split.

    They are the first dims of the group in both shapes that are not 1. A span is the number of
    elements in one item of the dim: [6, 4] -> [24] gives (0, 4, 0, 1).
    """
    group_heads = []
    for ins, outs in dim_groups(source, target):
        i = next((d for d in ins if source[d] != 1), ins[0])
        o = next((d for d in outs if target[d] != 1), outs[0])
        if source[i] == 1 and len(ins) + len(outs) > 2:
            continue  # several dims of size 1: nothing says which is which
        spans = [
            math.prod(s[d + 1 : g[-1] + 1]) for s, d, g in ((source, i, ins), (target, o, outs))
        ]
        group_heads.append((i, spans[0], o, spans[1]))
    return group_heads


def piece_starts(n: int, parts: Sequence[int]) -> list[int]:
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


def has_same_pieces(call: Call, d: int, span: int, m: int, out_span: int) -> bool:
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

    def cuts_agree(axes: tuple[int, ...]) -> bool:
        parts = [shape[axis] for axis in sorted(axes)]
        return [c * span for c in piece_starts(n, parts)] == [
            c * out_span for c in piece_starts(m, parts)
        ]

    accepted_axes: tuple[int, ...] = ()
    for axis in sorted(range(len(shape)), key=lambda axis: x.spec.sbp[axis] != S(d)):
        subsets = (
            s
            for k in range(len(accepted_axes) + 1)
            for s in itertools.combinations(accepted_axes, k)
        )
        if all(cuts_agree((*subset, axis)) for subset in subsets):
            accepted_axes += (axis,)
    return call.axis in accepted_axes


def _kept_and_exchanged_dims(call: Call) -> tuple[list[tuple[Split, Split]], list[int]]:
    """Return (splits that a view keeps, as (operand's, output's); dims that need an exchange).

    The dims are first dims of groups (see ``splittable_dims``) that the two shapes divide at
    different elements, so that ranks must exchange the elements between.
    """
    target = call.outs[0].shape
    kept_splits, exchanged_dims = [], []
    for i, span, o, out_span in splittable_dims(call.operands[0].shape, target):
        if has_same_pieces(call, i, span, target[o], out_span):
            kept_splits.append((S(i), S(o)))
        else:
            exchanged_dims.append(i)
    return kept_splits, exchanged_dims


def reshape(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of a view or reshape: a split stays if ranks keep their elements.

    Only the first dim of each group of dims that are merged or divided can be split: on 3 ranks,
    [6, 4] -> [24] has ``S(0) -> S(0)``. If its pieces in the two shapes differ, ranks exchange the
    elements between them, by the form "halo".
    """
    if call.operands[0].spec.dtype != call.outs[0].dtype:
        raise DoesNotFit("a view of another dtype")
    kept_splits, exchanged_dims = _kept_and_exchanged_dims(call)
    signatures = [
        call.broadcast_signature(),
        call.new_signature({0: P}, P),
        *(call.new_signature({0: s}, t) for s, t in kept_splits),
    ]
    signatures += _present_split_signatures(
        call, parts, [s.dim for s, _ in kept_splits] + exchanged_dims
    )
    return signatures + with_halo(call, parts, exchanged_dims)


def _present_split_signatures(call: Call, parts: int, firsts: Sequence[int]) -> list[Signature]:
    """Return a further SBP signature that takes the operand's present split as it is.

    It is for a split with a cut, or of a dim that is not the first of its group (not in
    ``firsts``). Each rank keeps its elements, and the output has a cut: [2, 8] -> [16] has ``S(1)
    -> S(0, of=8)``. The list is empty if the present split is another, or no split of the output
    gives each rank its elements.
    """
    x, out = call.operands[0], call.outs[0]
    entry, split_and_cut = x.spec.sbp[call.axis], call.split_and_cut()
    if split_and_cut is None and (not isinstance(entry, Split) or entry.cut or entry.dim in firsts):
        return []
    assert isinstance(entry, Split)
    other_dims = {
        e.dim for a, e in enumerate(x.spec.sbp) if a != call.axis and isinstance(e, Split)
    }
    if split_and_cut is None and other_dims.intersection(_group_of(entry.dim, x.shape, out.shape)):
        return []
    view_split = split_of_view(entry, dim_groups(x.shape, out.shape), x.shape, out.shape, parts)
    return [] if view_split is None else [call.new_signature({0: entry}, view_split, by_size=True)]


def _group_of(dim: int, source: Shape, target: Shape) -> range:
    """Return the dims of ``source`` that are in one group with ``dim``; empty if it is in none."""
    return next((ins for ins, _ in dim_groups(source, target) if dim in ins), range(0))


def reshape_as(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of reshape_as and view_as: those of reshape, with a second operand.

    Only the shape of the second operand is read. Where the output is split, the second operand is
    split in the same way, so that its shard has the local shape of the output. The second operand
    may also be P, as its values do not matter.
    """
    signatures = [
        call.broadcast_signature(),
        call.new_signature({0: P}, P),
        call.new_signature({1: P}, B),
        call.new_signature({0: P, 1: P}, P),
    ]
    return signatures + [
        call.new_signature({0: s, 1: t}, t) for s, t in _kept_and_exchanged_dims(call)[0]
    ]


def repeat_interleave(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of repeat_interleave by a number: other dims stay split.

    The repeated dim stays split if the pieces of the result are those of the operand, repeated.
    Otherwise ranks fetch the elements that their piece of the result holds.
    """
    (x,) = call.require_operands(1)
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    if call.get("dim") is None and x.ndim != 1:
        return signatures
    d = call.dim("dim", 0)
    signatures += [call.new_signature({0: S(e)}, S(e)) for e in range(x.ndim) if e != d]
    repeats = call.get("repeats")
    if call.get("output_size") is None and has_same_pieces(
        call, d, repeats, call.outs[0].shape[d], 1
    ):
        return [*signatures, call.new_signature({0: S(d)}, S(d))]
    return signatures + with_halo(call, parts, [d])


def with_local_sizes(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the arguments of ``op(x, *sizes)``, such as view, with the sizes of this rank's shard.

    ``ins`` and ``outs`` are the shapes of the shards of operands and outputs.
    """
    return (call.operands[0], tuple(outs[0])), {}


def _unflatten_arguments(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the arguments of unflatten with the sizes of this rank's shard."""
    d = call.dim("dim")
    count = len(outs[0]) - len(ins[0]) + 1
    return (call.operands[0], d, tuple(outs[0][d : d + count])), {}


ROWS = (
    Row(
        "_unsafe_view reshape view", reshape, localize=with_local_sizes, moves=True,
        numbers="*", any_size=True, sizing=Sizing.VIEW,
    ),
    # Any size: a dim of the result that is as long as the split dim is that dim, at all sizes.
    Row("flatten ravel", reshape, moves=True, any_size=True),
    Row("repeat_interleave", repeat_interleave, "input repeats dim output_size", moves=True),
    Row("reshape_as view_as", reshape_as, moves=True),
    # Composite, as decomposing it would not end: Tensor.unflatten is a Python function around a
    # builtin, which torch passes to the hook as Tensor.unflatten again.
    Row(
        "unflatten", reshape, "input dim sizes",
        localize=_unflatten_arguments, composite=True, moves=True,
    ),
)  # fmt: skip

add_rows(ROWS)
