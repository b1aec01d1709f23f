"""Products of groups where rows, columns or groups are split: each rank multiplies the rows that
are of its groups.

```
rows of x     offs = 3 4 7         groups 0, 1 here        group 2 here
a b c         -> w[0]              a b c d -> product      0 0 0 0
d             -> w[1]              0 0 0                   e f g -> product
e f g         -> w[2]
```

Which rows they are depends on values, and no shape does, so that the product is one op to those who
record or compile: ``consistent::grouped_mm(x, w, edges)``, where group i lies at edges[i] to
edges[i + 1], and what lies in no group gives zeros.

Torch's kernel takes rows whose length is a multiple of 16 bytes only. Pieces are filled up with
zeros, which the product does not see, and the result is cut to size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm as grouped
from torch.nn.functional import pad

from ...registry import Shards, form
from ...whole_numbers import has_values

_BYTES = 16


@form("grouped_mm")
def grouped_mm(shard: Shards) -> Tensor:
    """torch._grouped_mm of this rank's pieces."""
    x, w, *offs = shard.tensors
    dtype = shard.get("out_dtype")
    if not offs:
        return product(x, w, None, dtype)
    edges = pad(offs[0], (1, 0))
    if x.ndim != 2 or w.ndim != 3:
        return product(x, w, edges, dtype)
    (row, _), (rows, _) = shard.region(0)
    (group, *_), (groups, *_) = shard.region(1)
    edges = (edges - row).clamp(0, rows)[group : group + groups + 1]
    if has_values(edges):
        return product(x, w, edges, dtype)
    share = rows * groups // max(1, shard.specs[1].shape[0])  # in a simulation groups are alike
    return pad(product(x[:share], w, edges, dtype), (0, 0, 0, rows - share))


@torch.library.custom_op("consistent::grouped_mm", mutates_args=())
def product(
    x: Tensor, w: Tensor, edges: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``torch._grouped_mm`` of the groups between ``edges``; of [g, m, k] and [g, k, n] without
    them. Differentiable any number of times."""
    if edges is None:
        return _filled_up(x, w, None, dtype)
    first, *ends = edges.tolist()
    if not ends or first == ends[-1]:  # torch takes no product of nothing
        return x.new_zeros(_shape(x, w, edges))
    inner, outer = slice(first, ends[-1]), x.shape[0] if x.ndim == 2 else w.shape[1]
    if x.ndim == w.ndim == 2:
        return _filled_up(x[:, inner], w[inner], edges[1:] - first, dtype)
    around = first, outer - ends[-1]
    if x.ndim == 2:
        return pad(_filled_up(x[inner], w, edges[1:] - first, dtype), (0, 0, *around))
    return pad(_filled_up(x, w[:, inner], edges[1:] - first, dtype), around)


@product.register_fake
def _(x: Tensor, w: Tensor, edges: Tensor | None = None, dtype: Any = None) -> Tensor:
    return x.new_empty(_shape(x, w, edges))


def _shape(x: Tensor, w: Tensor, edges: Tensor | None) -> tuple[int, ...]:
    if x.ndim == w.ndim == 2:
        assert edges is not None
        return edges.shape[0] - 1, x.shape[0], w.shape[1]
    return *(x.shape[:-1] if w.ndim == 3 else x.shape[1:-1]), w.shape[-1]


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, w, edges, _dtype = inputs
    ctx.save_for_backward(x, w, edges)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, w, edges = ctx.saved_tensors
    to_x, to_w, *_ = ctx.needs_input_grad
    return (
        product(grad, w.mT, edges) if to_x else None,
        product(x.mT, grad, edges) if to_w else None,
        None,
        None,
    )


product.register_autograd(_gradients, setup_context=_keep)


def _filled_up(x: Tensor, w: Tensor, offs: Tensor | None, dtype: Any) -> Tensor:
    """The product of operands filled up to whole rows, cut to size."""
    inner, outer = _missing(w.shape[-2], w), _missing(w.shape[-1], w)
    filled = _whole_rows(pad(x, (0, inner))), _whole_rows(pad(w, (0, outer, 0, inner)))
    made = grouped(*filled, offs=offs, out_dtype=dtype)
    return made[..., : w.shape[-1]].contiguous()


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
