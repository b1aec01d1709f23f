"""Rules of ops that join tensors (cat, hstack, ...), or split one into several (split, chunk, ...).

Splits along dims other than the joined one stay; P passes if all operands are P. Along the joined
dim itself the pieces of the result are cut from the pieces of the operands, which ranks exchange:

```
            rank 0   rank 1                  rank 0     rank 1
x  S(0)     a b      c d        cat          a b c d    e f g h
y  S(0)     e f      g h       ----->        S(0)
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...spec import P, S, Split
from ..halo.halo import fetched_by_rank
from ..notation import places, rearranged
from ..signature import Call, DoesNotFit, Operand, Signature
from ..table import Row, add_rows

JOINED, CUT, PARTS = "cat", "split", "split_parts"
_FEW = 16  # up to this many operands, one of them may be split alone

# Op -> what it does to each tensor before it joins them along the dim in _JOINED.
_RAISED = {
    "column_stack": lambda x: x.unsqueeze(1) if x.ndim == 1 else x,
    "dstack": torch.atleast_3d,
    "hstack": torch.atleast_1d,
    "row_stack": torch.atleast_2d,
    "vstack": torch.atleast_2d,
}
_JOINED = {"column_stack": 1, "dstack": 2, "hstack": 1, "row_stack": 0, "vstack": 0}


def _joined(call: Call, moves: Mapping[int, int]) -> list[Signature]:
    """Return the SBP signatures in which all operands are split alike, and the one from P to P.

    ``moves`` has dim of the operands -> dim of the result, for the dims that may be split.
    """
    every = [i for i, operand in enumerate(call.operands) if not _skipped(call, operand)]
    made = [call.whole(), call.make(dict.fromkeys(every, P), P)]
    return made + [call.make(dict.fromkeys(every, S(d)), S(place)) for d, place in moves.items()]


def _skipped(call: Call, operand: Operand) -> bool:
    """Return whether torch skips ``operand``: cat ignores a tensor of shape [0] among others."""
    return operand.shape == (0,) and any(other.shape != (0,) for other in call.operands)


def _ndim(call: Call) -> int:
    """Return the number of dims of the tensors that cat joins, without those that cat skips.

    Raises:
        DoesNotFit: they differ in it, or there are none.
    """
    tensors: Sequence[Operand] = call.get("tensors")
    found = {operand.ndim for operand in tensors if not _skipped(call, operand)}
    if len(found) != 1:
        raise DoesNotFit("tensors of different numbers of dims")
    return found.pop()


def joined(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of cat: dims other than the joined one stay split.

    All operands must then have the same split. Along the joined dim, all operands are split, or, if
    there are few, a single one: ``S(0), S(0) -> S(0)`` and ``S(0), B -> S(0)``. Ranks then fetch
    the parts of the operands that are in their piece of the result.
    """
    n = _ndim(call)
    dim = call.dim("dim", 0, ndim=n)
    every = [i for i, operand in enumerate(call.operands) if not _skipped(call, operand)]
    if len(every) == 1:  # the result is that tensor: the first keys added to an empty cache
        return _joined(call, {d: d for d in range(n)})
    made = _joined(call, {d: d for d in range(n) if d != dim})
    exchanged = _exchanged(call, dim, parts)
    for split in [every, *([i] for i in every if len(every) <= _FEW)]:
        nbytes = _busiest([exchanged[i] for i in split])
        made.append(call.make(dict.fromkeys(split, S(dim)), S(dim), JOINED, nbytes))
    return made


def offsets(call: Call, dim: int) -> list[int | None]:
    """Return the index in the result at which each operand of cat starts: sizes 2, 3, 1 -> 0, 2, 5.

    It is None for operands that torch skips.
    """
    found, start = [], 0
    for operand in call.operands:
        skipped = _skipped(call, operand)
        found.append(None if skipped else start)
        start += 0 if skipped else operand.shape[dim]
    return found


def _exchanged(call: Call, dim: int, parts: int) -> list[list[int]]:
    """Return the bytes that each rank fetches of each operand of cat, as [operand][rank].

    Operands and result are all split along ``dim``, over ``parts`` ranks.
    """
    m = call.outs[0].shape[dim]
    starts = [start or 0 for start in offsets(call, dim)]
    return [
        fetched_by_rank(x, dim, m, lambda o, e, a=start: [(o - a, e - a)], parts)
        for x, start in zip(call.operands, starts, strict=True)
    ]


def _busiest(each: Sequence[list[int]]) -> int:
    """Return the most bytes that a rank fetches if several tensors are exchanged at once.

    ``each`` has for each tensor the bytes that each rank fetches of it.
    """
    return max(map(sum, zip(*each, strict=True)), default=0)


def joined_by_name(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of hstack, vstack, ...: dims other than the joined one stay split.

    ``vstack`` of two vectors, which become the rows of a matrix, has ``S(0), S(0) -> S(1)``.
    """
    n = _ndim(call)
    joint = 0 if call.name == "hstack" and n <= 1 else _JOINED[call.name]
    found = places(_RAISED[call.name], call.operands[0].shape)
    if n and not all(
        places(_RAISED[call.name], o.shape).keys() == found.keys() for o in call.operands
    ):
        raise DoesNotFit("sizes of 1 in some operands only")
    return _joined(call, {d: place for d, (place,) in found.items() if place != joint})


def cut(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of split, chunk, tensor_split: dims not divided stay split.

    If the divided dim itself is split, each part of the result is split along it again. Ranks then
    fetch their piece of every part.
    """
    (x,) = call.take(1)
    dim = 2 if call.name == "dsplit" else 0
    if call.name == "hsplit":
        dim = min(1, x.ndim - 1)
    elif "dim" in call.params:
        dim = call.dim("dim", 0)
    others = [s for s in rearranged(call, parts) if s.ins[0] is not S(dim)]
    start, each = 0, []
    for out in call.outs:
        m = out.shape[dim]
        each.append(fetched_by_rank(x, dim, m, lambda o, e, a=start: [(o + a, e + a)], parts))
        start += m
    if start != x.shape[dim]:  # tensor_split at decreasing positions gives overlapping parts
        return others
    others += _by_parts(call, dim)
    return [*others, call.make({0: S(dim)}, S(dim), CUT, _busiest(each))]


def _by_parts(call: Call, dim: int) -> list[Signature]:
    """Return the SBP signature that gives each rank its own piece of every part without messages.

    It is for an operand split by ``S(d, of=...)``, whose dim consists of parts that are divided
    among the ranks one by one, if the op's results are whole parts. Otherwise there is none.
    """
    (x,), found = call.operands, call.cut_split()
    if found is None or found[0].dim != dim:
        return []
    entry, how = found
    outs, start = [], 0
    for out in call.outs:
        left = how.of_parts(x.shape[dim], start, out.shape[dim])
        if left is None:
            return []
        outs.append(Split(dim, *left))
        start += out.shape[dim]
    return [call.make({0: entry}, outs, PARTS, by_size=True)]


ROWS = (
    Row("cat concat concatenate", joined, "tensors dim", moves=True, any_size=True),
    Row(
        "chunk split split_with_sizes tensor_split", cut, "input sizes dim",
        moves=True, any_size=True,
    ),
    Row("column_stack dstack hstack row_stack vstack", joined_by_name, "tensors", moves=True),
    Row("dsplit hsplit vsplit", cut, moves=True),
    Row("stack", "...* -> ...[D]; moves", "tensors dim=0"),
    Row("unsafe_chunk unsafe_split unsafe_split_with_sizes", cut, "input sizes dim", moves=True),
)  # fmt: skip

add_rows(ROWS)
