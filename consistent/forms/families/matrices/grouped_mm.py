"""Products of groups where rows, columns or groups are split: each rank multiplies the rows that
are of its groups.

```
rows of x     offs = 3 4 7         groups 0, 1 here        group 2 here
a b c         -> w[0]              a b c d -> product      0 0 0 0
d             -> w[1]              0 0 0                   e f g -> product
e f g         -> w[2]
```

Torch's kernel takes rows whose length is a multiple of 16 bytes only. Pieces are filled up with
zeros, which the product does not see, and the result is cut to size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ...registry import Shards, form
from ...whole_numbers import whole_numbers

_BYTES = 16


@form("grouped_mm")
def grouped_mm(shard: Shards) -> Tensor:
    """torch._grouped_mm of this rank's pieces."""
    x, w = shard.tensors[:2]
    if len(shard.tensors) == 2 or x.ndim != 2 or w.ndim != 3:
        return _product(shard, x, w, *shard.tensors[2:])
    (row, _), (rows, _) = shard.region(0)
    (group, *_), (groups, *_) = shard.region(1)
    ends = (shard.tensors[2] - row).clamp(0, rows)
    edges = [0, *whole_numbers(ends, lambda: _even_ends(shard, row, rows))]
    first, last = edges[group], edges[group + groups]
    mine = x[first:last]
    if groups:
        made = _product(shard, mine, w, ends[group : group + groups] - first)
    else:  # torch takes no product of no groups; this one keeps both in the graph
        made = (mine @ w.sum(0)).to(shard.outs[0].dtype)
    return pad(made, (0, 0, first, rows - last))


def _even_ends(shard: Shards, row: int, rows: int) -> list[int]:
    """Where groups end among these rows, if all have as many rows."""
    total, groups = shard.specs[0].shape[0], shard.specs[1].shape[0]
    return [min(max((k + 1) * total // groups - row, 0), rows) for k in range(groups)]


def _product(shard: Shards, x: Tensor, w: Tensor, *offs: Tensor) -> Tensor:
    """The product of operands filled up to whole rows, cut to size."""
    wide = shard.get("out_dtype")
    given = {} if wide is None else {"out_dtype": wide}
    inner, outer = _missing(w.shape[-2], w), _missing(w.shape[-1], w)
    made = shard.run(_whole_rows(pad(x, (0, inner))), _whole_rows(pad(w, (0, outer, 0, inner))),
                     **{"offs": offs[0], **given} if offs else given)  # fmt: skip
    return made[..., : w.shape[-1]] if outer else made


def _missing(n: int, of: Tensor) -> int:
    """How many elements fill ``n`` up to rows that torch takes; one such row at least."""
    step = _BYTES // of.element_size()
    return max(step, -(-n // step) * step) - n


def _whole_rows(x: Tensor) -> Tensor:
    """``x`` with rows or columns that lie as torch takes them."""
    for along, across in ((-1, -2), (-2, -1)):
        length = x.stride(across)
        apart = length >= max(1, x.shape[along])
        if x.stride(along) == 1 and apart and length * x.element_size() % _BYTES == 0:
            return x
    return x.contiguous()
