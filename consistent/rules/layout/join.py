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
from ..halo.halo import fetched_bytes_by_rank
from ..notation import kept_dim_positions, view_signatures
from ..signature import Call, DoesNotFit, Operand, Signature
from ..table import Row, add_rows

JOIN_FORM, SPLIT_FORM, SPLIT_PARTS_FORM = "cat", "split", "split_parts"
_MAX_SPLIT_ALONE = 16  # cat of up to this many operands may have one of them S and the others B

# Op -> what it does to each tensor before it joins them along the dim in _JOINED_DIM.
_TO_JOINED_NDIM = {
    "column_stack": lambda x: x.unsqueeze(1) if x.ndim == 1 else x,
    "dstack": torch.atleast_3d,
    "hstack": torch.atleast_1d,
    "row_stack": torch.atleast_2d,
    "vstack": torch.atleast_2d,
}
_JOINED_DIM = {"column_stack": 1, "dstack": 2, "hstack": 1, "row_stack": 0, "vstack": 0}


def _same_split_signatures(call: Call, moves: Mapping[int, int]) -> list[Signature]:
    """Return the SBP signatures in which all operands are split alike, and the one from P to P.

    ``moves`` has dim of the operands -> dim of the result, for the dims that may be split.
    """
    joined_operands = [
        i for i, operand in enumerate(call.operands) if not _is_skipped(call, operand)
    ]
    signatures = [
        call.broadcast_signature(),
        call.new_signature(dict.fromkeys(joined_operands, P), P),
    ]
    return signatures + [
        call.new_signature(dict.fromkeys(joined_operands, S(d)), S(place))
        for d, place in moves.items()
    ]


def _is_skipped(call: Call, operand: Operand) -> bool:
    """Return whether torch skips ``operand``: cat ignores a tensor of shape [0] among others."""
    return operand.shape == (0,) and any(other.shape != (0,) for other in call.operands)


def _joined_ndim(call: Call) -> int:
    """Return the number of dims of the tensors that cat joins, without those that cat skips.

    Raises:
        DoesNotFit: they differ in it, or there are none.
    """
    tensors: Sequence[Operand] = call.get("tensors")
    ndims = {operand.ndim for operand in tensors if not _is_skipped(call, operand)}
    if len(ndims) != 1:
        raise DoesNotFit("tensors of different numbers of dims")
    return ndims.pop()


def cat(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of cat: dims other than the joined one stay split.

    All operands must then have the same split. Along the joined dim, all operands are split, or, if
    there are few, a single one: ``S(0), S(0) -> S(0)`` and ``S(0), B -> S(0)``. Ranks then fetch
    the parts of the operands that are in their piece of the result.
    """
    n = _joined_ndim(call)
    dim = call.dim("dim", 0, ndim=n)
    joined_operands = [
        i for i, operand in enumerate(call.operands) if not _is_skipped(call, operand)
    ]
    # The result is the one tensor, as when the first keys are added to an empty cache.
    if len(joined_operands) == 1:
        return _same_split_signatures(call, {d: d for d in range(n)})
    signatures = _same_split_signatures(call, {d: d for d in range(n) if d != dim})
    fetched_bytes = _fetched_bytes_by_operand(call, dim, parts)
    for split_operands in [
        joined_operands,
        *([i] for i in joined_operands if len(joined_operands) <= _MAX_SPLIT_ALONE),
    ]:
        nbytes = _max_bytes_per_rank([fetched_bytes[i] for i in split_operands])
        signatures.append(
            call.new_signature(dict.fromkeys(split_operands, S(dim)), S(dim), JOIN_FORM, nbytes)
        )
    return signatures


def operand_offsets(call: Call, dim: int) -> list[int | None]:
    """Return the index in the result at which each operand of cat starts: sizes 2, 3, 1 -> 0, 2, 5.

    It is None for operands that torch skips.
    """
    starts, start = [], 0
    for operand in call.operands:
        skipped = _is_skipped(call, operand)
        starts.append(None if skipped else start)
        start += 0 if skipped else operand.shape[dim]
    return starts


def _fetched_bytes_by_operand(call: Call, dim: int, parts: int) -> list[list[int]]:
    """Return the bytes that each rank fetches of each operand of cat, as [operand][rank].

    Operands and result are all split along ``dim``, over ``parts`` ranks.
    """
    m = call.outs[0].shape[dim]
    starts = [start or 0 for start in operand_offsets(call, dim)]
    return [
        fetched_bytes_by_rank(x, dim, m, lambda o, e, a=start: [(o - a, e - a)], parts)
        for x, start in zip(call.operands, starts, strict=True)
    ]


def _max_bytes_per_rank(bytes_by_tensor: Sequence[list[int]]) -> int:
    """Return the most bytes that a rank fetches if several tensors are exchanged at once.

    ``bytes_by_tensor`` has for each tensor the bytes that each rank fetches of it.
    """
    return max(map(sum, zip(*bytes_by_tensor, strict=True)), default=0)


def stack_by_name(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of hstack, vstack, ...: dims other than the joined one stay split.

    ``vstack`` of two vectors, which become the rows of a matrix, has ``S(0), S(0) -> S(1)``.
    """
    n = _joined_ndim(call)
    joined_dim = 0 if call.name == "hstack" and n <= 1 else _JOINED_DIM[call.name]
    positions = kept_dim_positions(_TO_JOINED_NDIM[call.name], call.operands[0].shape)
    if n and not all(
        kept_dim_positions(_TO_JOINED_NDIM[call.name], o.shape).keys() == positions.keys()
        for o in call.operands
    ):
        raise DoesNotFit("sizes of 1 in some operands only")
    return _same_split_signatures(
        call, {d: place for d, (place,) in positions.items() if place != joined_dim}
    )


def split(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of ops that divide a dim: split, chunk, tensor_split.

    A tensor that is sharded along another dim gives outputs that are sharded along it. If it is
    sharded along the divided dim, so is each output, and ranks fetch their shard of each output.
    """
    (x,) = call.require_operands(1)
    dim = 2 if call.name == "dsplit" else 0
    if call.name == "hsplit":
        dim = min(1, x.ndim - 1)
    elif "dim" in call.params:
        dim = call.dim("dim", 0)
    signatures = [s for s in view_signatures(call, parts) if s.ins[0] is not S(dim)]
    start, bytes_by_part = 0, []
    for out in call.outs:
        m = out.shape[dim]
        bytes_by_part.append(
            fetched_bytes_by_rank(x, dim, m, lambda o, e, a=start: [(o + a, e + a)], parts)
        )
        start += m
    if start != x.shape[dim]:  # tensor_split at decreasing positions gives overlapping parts
        return signatures
    signatures += _signatures_by_parts(call, dim)
    return [
        *signatures,
        call.new_signature({0: S(dim)}, S(dim), SPLIT_FORM, _max_bytes_per_rank(bytes_by_part)),
    ]


def _signatures_by_parts(call: Call, dim: int) -> list[Signature]:
    """Return the SBP signature by which each rank has its shard of every output without messages.

    It is for an operand that is ``S(d, of=...)``: its dim consists of parts that are divided among
    the ranks one by one, and each output of the op is one or several of them. Otherwise there is
    none.
    """
    (x,), split_and_cut = call.operands, call.split_and_cut()
    if split_and_cut is None or split_and_cut[0].dim != dim:
        return []
    entry, dim_cut = split_and_cut
    outs, start = [], 0
    for out in call.outs:
        cut_of_part = dim_cut.cut_of_slice(x.shape[dim], start, out.shape[dim])
        if cut_of_part is None:
            return []
        outs.append(Split(dim, *cut_of_part))
        start += out.shape[dim]
    return [call.new_signature({0: entry}, outs, SPLIT_PARTS_FORM, by_size=True)]


ROWS = (
    Row("cat concat concatenate", cat, "tensors dim", moves=True, any_size=True),
    Row(
        "chunk split split_with_sizes tensor_split", split, "input sizes dim",
        moves=True, any_size=True,
    ),
    Row("column_stack dstack hstack row_stack vstack", stack_by_name, "tensors", moves=True),
    Row("dsplit hsplit vsplit", split, moves=True),
    Row("stack", "...* -> ...[D]; moves", "tensors dim=0"),
    Row("unsafe_chunk unsafe_split unsafe_split_with_sizes", split, "input sizes dim", moves=True),
)  # fmt: skip

add_rows(ROWS)
