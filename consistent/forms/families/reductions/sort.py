"""Forms of sort, argsort and msort along a split dim: a sample sort that is stable over all ranks.

```
rank 0   5 1 4 | sort   1 4 5 | cut    1      to 0    1 2 3
rank 1   2 6 3 |        2 3 6 | at 3   2 3    to 1    4 5 6
```

Each rank sorts its shard, all ranks agree from samples where to cut (``sort_cuts.py``), and an
all-to-all exchanges the runs between the cuts. Equal items keep their order: runs arrive in rank
order, and cuts order equal items by logical index. Where pieces are so short that all of their
items would be samples, the pieces are gathered instead, and every rank sorts the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirrored.transports.default import current

from ....movement.boxed import box
from ....movement.differentiable import exchange_rows
from ....spec import B, Split
from ...join_results import index_and_count
from ...registry import Shards, form
from .sort_cuts import SAMPLES, Cuts
from .sort_keys import sort_keys


@form("sort")
def _sort(shard: Shards) -> Any:
    """Run sort, argsort or msort along a split dim.

    The ranks exchange parts of their sorted shards, or gather the shards if they are short.
    """
    name, x = shard.call.name, shard.tensors[0]
    descending = name != "msort" and bool(shard.get("descending", False))
    dim = 0 if name == "msort" else shard.call.dim("dim", -1)
    rows = x.movedim(dim, -1).unsqueeze(0).flatten(0, -2)
    if shard.coordinate is None or not len(rows):  # then no rank that the form joins has rows
        return shard.run(*shard.args, **shard.kwargs)
    if _is_short(shard, dim):
        values, indices = _gather_and_sort(shard, dim, descending)
    else:
        sorted_rows = [_sort_row(shard, row, dim, descending) for row in rows]
        shape = x.movedim(dim, -1).shape
        values, indices = (
            torch.stack(each).reshape(shape).movedim(-1, dim)
            for each in zip(*sorted_rows, strict=True)
        )
    if name == "msort":
        return values
    return indices if name == "argsort" else torch.return_types.sort((values, indices))


def _is_short(shard: Shards, dim: int) -> bool:
    """Return whether gathering the pieces is cheaper than exchanging sorted runs.

    It is if all of their items would be samples, by which the ranks agree on the cuts.
    """
    n = index_and_count(shard)[1]
    return n == 1 or max(sizes[dim] for _, sizes in shard.regions()) <= SAMPLES * n


def _gather_and_sort(shard: Shards, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Gather the tensor along ``dim``, sort it, and return this rank's pieces of the result."""
    spec, split = shard.specs[0], Split(dim % shard.specs[0].ndim)
    whole_spec = spec.with_sbp(tuple(B if entry == split else entry for entry in spec.sbp))
    result = box(shard.tensors[0], spec, whole_spec).sort(
        dim=dim, descending=descending, stable=True
    )
    start, size = (each[dim] for each in shard.region())
    values, indices = (x.narrow(dim, start, size).clone() for x in result)
    return values, indices


def _sort_row(shard: Shards, x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Sort one vector whose pieces the ranks hold; ``x`` is this rank's piece.

    Returns this rank's piece of (sorted values, indices).
    """
    ranks, me = shard.ranks, index_and_count(shard)[0]
    pieces = [(starts[dim], sizes[dim]) for starts, sizes in shard.regions()]
    key, order = sort_keys(x, descending).sort(stable=True)
    place = order + pieces[me][0]
    cuts = Cuts(tuple(size for _, size in pieces), me, ranks)
    (counts,) = current().as_one(cuts, [key, place], ranks)
    sent_place = place.to(torch.int32 if shard.specs[0].shape[dim] < 2**31 else torch.int64)
    x = exchange_rows(x.gather(0, order), counts, me, ranks)
    place = exchange_rows(sent_place, counts, me, ranks).long()
    # Runs arrive in rank order, so a stable sort here gives the same order as sorting the whole.
    order = sort_keys(x, descending).sort(stable=True).indices
    return x.gather(0, order), place.gather(0, order)
