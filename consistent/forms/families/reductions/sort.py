"""sort, argsort and msort along a split dim: a sample sort, stable as a whole.

```
rank 0   5 1 4 | sort   1 4 5 | cut    1      to 0    1 2     even out    1 2 3
rank 1   2 6 3 |        2 3 6 | at 3   2 3 6  to 1    3 4 5 6             4 5 6
```

Each rank sorts its shard, all agree from a few samples of each where to cut, and an all-to-all
exchanges the runs between the cuts. Cuts by samples miss the borders of the pieces by a few items,
so a second, small exchange evens the pieces out. Equal items keep their order: runs arrive in the
order of ranks, and a cut compares equal items by their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....movement.differentiable import box, swap
from ....spec import B, Split
from ...even_out import evened, gathered, numbers
from ...join_results import slot
from ...registry import Shards, form
from ...whole_numbers import has_values
from .sort_keys import keys

_SAMPLES = 64  # of each rank, for each rank: cuts then miss a border by a 64th of a piece at most


@form("sort")
def _sort(shard: Shards) -> Any:
    """sort, argsort, msort."""
    name, x = shard.call.name, shard.tensors[0]
    descending = name != "msort" and bool(shard.get("descending", False))
    dim = 0 if name == "msort" else shard.call.dim("dim", -1)
    if torch.compiler.is_compiling() and shard.coordinate is not None:
        return _sorted_whole(shard, dim)  # a program cannot send as many items as values decide
    rows = x.movedim(dim, -1).unsqueeze(0).flatten(0, -2)
    if shard.coordinate is None or not len(rows):  # all ranks that the form joins have none
        return shard.run(*shard.args, **shard.kwargs)
    made = [_sorted_row(shard, row, dim, descending) for row in rows]
    shape = x.movedim(dim, -1).shape
    values, indices = (
        torch.stack(each).reshape(shape).movedim(-1, dim) for each in zip(*made, strict=True)
    )
    if name == "msort":
        return values
    return indices if name == "argsort" else torch.return_types.sort((values, indices))


def _sorted_whole(shard: Shards, dim: int) -> Any:
    """The same by gathering along ``dim``; what is sent then depends on sizes alone."""
    spec = shard.specs[0]
    split = Split(dim % spec.ndim)
    whole = spec.with_sbp(tuple(B if entry == split else entry for entry in spec.sbp))
    args = [box(x, spec, whole) if x is shard.tensors[0] else x for x in shard.args]
    kwargs = {
        k: box(x, spec, whole) if x is shard.tensors[0] else x for k, x in shard.kwargs.items()
    }
    out = shard.run(*args, **kwargs)
    start, size = (each[dim] for each in shard.region())
    if isinstance(out, Tensor):
        return out.narrow(dim, start, size)
    return torch.return_types.sort(tuple(x.narrow(dim, start, size) for x in out))


def _sorted_row(shard: Shards, x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """This rank's pieces of the sorted vector and of its indices; ``x`` is a piece of the
    vector."""
    ranks, (me, n) = shard.ranks, slot(shard)
    pieces = [(starts[dim], sizes[dim]) for starts, sizes in shard.regions()]
    key, order = keys(x, descending).sort(stable=True)
    place = order + pieces[me][0]
    counts = _counts(shard, key, place, pieces)
    going, coming = counts[me], [row[me] for row in counts]
    small = place.to(torch.int32 if shard.specs[0].shape[dim] < 2**31 else torch.int64)
    x = swap(x.gather(0, order), going, coming, ranks)
    place = swap(small, going, coming, ranks).long()
    # Runs come in the order of ranks, so a stable sort merges them as the whole would be sorted.
    order = keys(x, descending).sort(stable=True).indices
    x, place = x.gather(0, order), place.gather(0, order)
    held = [sum(row[k] for row in counts) for k in range(n)]
    return evened(shard, x, held, pieces), evened(shard, place, held, pieces)


def _counts(
    shard: Shards, key: Tensor, place: Tensor, pieces: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """How many items go from each rank to each: [from][to], the same on every rank."""
    splitters = _splitters(shard, key, place, pieces)
    if has_values(key):
        ends = [0, *_cut(key, place, splitters), len(key)]
    else:  # in a simulation the items of each rank are spread evenly
        ends = [k * len(key) // len(pieces) for k in range(len(pieces) + 1)]
    return numbers(shard, [b - a for a, b in itertools.pairwise(ends)], key.device)


def _splitters(
    shard: Shards, key: Tensor, place: Tensor, pieces: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """(key, place) of an item near each inner border of the sorted whole."""
    most = _SAMPLES * len(pieces)
    # Sample j of a rank stands for its items from spots[j] up to the next one.
    spots = [[j * size // min(size, most) for j in range(min(size, most))] for _, size in pieces]
    mine = torch.tensor(spots[slot(shard)[0]], device=key.device).long()
    sample = torch.stack([key[mine].long(), place[mine]], 1)
    every = gathered(shard, sample, [len(s) for s in spots])
    weights = [
        b - a
        for s, (_, size) in zip(spots, pieces, strict=True)
        for a, b in zip(s, [*s[1:], size], strict=False)  # an empty piece has no spots
    ]
    sampled, places = torch.cat(every).unbind(1)
    sampled, order = sampled.sort(stable=True)
    before = torch.tensor([0, *weights], device=key.device)
    before[1:] = before[1:][order]
    before = before.cumsum(0)[:-1]
    wanted = torch.tensor([start for start, _ in pieces[1:]], device=key.device)
    if not has_values(sampled):
        return []
    chosen = torch.searchsorted(before, wanted).tolist()
    found = list(zip(sampled.tolist(), places[order].tolist(), strict=True))
    end = (torch.iinfo(key.dtype).max, pieces[-1][0] + pieces[-1][1])
    return [found[c] if c < len(found) else end for c in chosen]


def _cut(key: Tensor, place: Tensor, splitters: Sequence[tuple[int, int]]) -> list[int]:
    """How many of this rank's sorted items come before each splitter."""
    found = []
    for at, where in splitters:
        low, high = (int(torch.searchsorted(key, at, right=right)) for right in (False, True))
        found.append(low + int(torch.searchsorted(place[low:high], where)))
    return found
