"""Items of a dim put in the order of the ranks that hold them, for splits that deal out several
runs: what is sent to a rank then lies together, and each move is the one of a plain split.

```
S(0, cut="zigzag") of 8 items, 2 ranks     by ranks   0 1 6 7 | 2 3 4 5     logical   0 1 2 ... 7
```
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mirrored.transports.default import current

from ..spec import Runs, Split, overlapping

_AS_INTEGERS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


@lru_cache(maxsize=1 << 10)
def _order(entry: Split, n: int, parts: int) -> tuple[Tensor, Tensor] | None:
    """(logical places in the order of ranks, places by ranks in the logical order), on the CPU;
    None where these are one order."""
    runs = [run for k in range(parts) for run in entry.runs(n, parts, k)]
    if all(a + size == b for (a, size), (b, _) in zip(runs, runs[1:])):
        return None
    by_ranks = places(runs)
    return by_ranks, torch.argsort(by_ranks)


def _constant(x: Tensor) -> Tensor:
    """``x``, which was made earlier. A program that is recorded learns that it is always the same,
    as of the tensors that `torch.tensor` makes."""
    return torch.ops.aten.lift_fresh.default(x)


def places(runs: Sequence[tuple[int, int]]) -> Tensor:
    """The items of ``runs``, one by one, as indices on the CPU."""
    found = [torch.arange(start, start + size) for start, size in runs]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def by_ranks(x: Tensor, entry: Split, parts: int) -> Tensor:
    """``x``, whole along the dim of ``entry``, with the items of each rank together."""
    order = _order(entry, x.shape[entry.dim], parts)
    return x if order is None else x.index_select(entry.dim, _constant(order[0]).to(x.device))


def in_logical_order(x: Tensor, entry: Split, parts: int) -> Tensor:
    """``x``, with the items of each rank together along the dim of ``entry``, in order again."""
    order = _order(entry, x.shape[entry.dim], parts)
    return x if order is None else x.index_select(entry.dim, _constant(order[1]).to(x.device))


def taken(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """The items of ``runs`` of a tensor that has all of them; a view where there is one run."""
    if len(runs) < 2:
        start, size = runs[0] if runs else (0, 0)
        return x.narrow(dim, start, size)
    return x.index_select(dim, places(runs).to(x.device))


def placed(x: Tensor, dim: int, runs: Runs, total: int, rest: float) -> Tensor:
    """A tensor of ``total`` items along ``dim`` that has ``x`` at ``runs``, and ``rest``
    elsewhere."""
    shape = list(x.shape)
    shape[dim] = total
    out = torch.full(shape, rest, dtype=x.dtype, device=x.device)
    return _put(out, dim, places(runs), x)


def recut(x: Tensor, src: Split, dst: Split, n: int, index: int, ranks: tuple[int, ...]) -> Tensor:
    """The items of ``dst`` that this rank, ``index`` of ``ranks``, is to hold, of those of ``src``
    that the ranks hold: each is sent what it lacks, and that once."""
    dim, parts = src.dim, len(ranks)
    have, want = src.runs(n, parts, index), dst.runs(n, parts, index)
    pieces, shapes, arrived = [], [], []
    for k in range(parts):
        going = overlapping(have, dst.runs(n, parts, k))
        coming = overlapping(src.runs(n, parts, k), want)
        pieces.append(taken(x, dim, _within(going, have)).contiguous())
        arrived.append(places(_within(coming, want)))
        shapes.append((*x.shape[:dim], len(arrived[-1]), *x.shape[dim + 1 :]))
    got = current().all_to_all(pieces, shapes, ranks)
    out = x.new_empty([*x.shape[:dim], sum(map(len, arrived)), *x.shape[dim + 1 :]])
    for part, at in zip(got, arrived, strict=True):
        _put(out, dim, at, part)
    return out


def _put(out: Tensor, dim: int, at: Tensor, x: Tensor) -> Tensor:
    """``out`` with ``x`` at the places ``at``. Torch copies no float8 and no unsigned numbers to
    indices, and their bits are those of integers."""
    number, at = _AS_INTEGERS.get(x.dtype), at.to(x.device)
    if number is None:
        return out.index_copy_(dim, at, x)
    out.view(number).index_copy_(dim, at, x.view(number))
    return out


def _within(some: Runs, of: Runs) -> Runs:
    """Where ``some``, which lie in ``of``, are in a shard that holds ``of``."""
    found, before, i = [], 0, 0
    for start, size in some:
        while start >= of[i][0] + of[i][1]:
            before += of[i][1]
            i += 1
        found.append((before + start - of[i][0], size))
    return tuple(found)
