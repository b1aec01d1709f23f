"""Form of grouped matmuls where rows, columns or groups are split.

Each rank multiplies the rows that belong to its groups.

```
rows of x     offs = 3 4 7         groups 0, 1 here        group 2 here
a b c         -> w[0]              a b c d -> product      0 0 0 0
d             -> w[1]              0 0 0                   e f g -> product
e f g         -> w[2]
```

The number of rows in a group depends on values, but no shape does. So recorders and compilers get
the product as one op: ``consistent::grouped_mm(x, w, edges)``, where group i spans edges[i] to
edges[i + 1], and rows outside all groups give zeros.

Torch's kernel takes only rows whose length is a multiple of 16 bytes. Pieces are padded with zeros,
which do not change the product, and the result is cut to size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm as grouped
from torch.nn.functional import pad

from ...registry import Shards, form
from ...whole_numbers import has_values

_ROW_ALIGNMENT = 16


@form("grouped_mm")
def grouped_mm(shard: Shards) -> Tensor:
    """Run torch._grouped_mm on this rank's rows, columns and groups.

    Where groups are split, the rows of other ranks' groups give zeros, so the ranks' results add
    up.
    """
    x, w, *offs = shard.tensors
    dtype = shard.get("out_dtype")
    if not offs:
        return product(x, w, None, dtype)
    edges = pad(offs[0], (1, 0))
    if x.ndim != 2 or w.ndim != 3:
        return product(x, w, edges, dtype)
    (row, _), (rows, _) = shard.region(0)
    (group, *_), (groups, *_) = shard.region(1)
    # Clamped to this rank's rows: a group that is elsewhere becomes empty here.
    edges = (edges - row).clamp(0, rows)[group : group + groups + 1]
    if has_values(edges):
        return product(x, w, edges, dtype)
    share = rows * groups // max(1, shard.specs[1].shape[0])  # simulated: equal groups
    return pad(product(x[:share], w, edges, dtype), (0, 0, 0, rows - share))


@torch.library.custom_op("consistent::grouped_mm", mutates_args=())
def product(
    x: Tensor, w: Tensor, edges: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``torch._grouped_mm`` of the groups between ``edges``, as one op.

    Group i spans edges[i] to edges[i + 1]; rows outside all groups give zeros. Without ``edges``
    the operands are [g, m, k] and [g, k, n]. Differentiable any number of times.
    """
    if edges is None:
        return _padded_grouped_mm(x, w, None, dtype)
    first, *ends = edges.tolist()
    if not ends or first == ends[-1]:  # torch rejects empty products
        return x.new_zeros(_product_shape(x, w, edges))
    inner, outer = slice(first, ends[-1]), x.shape[0] if x.ndim == 2 else w.shape[1]
    if x.ndim == w.ndim == 2:
        return _padded_grouped_mm(x[:, inner], w[inner], edges[1:] - first, dtype)
    padding = first, outer - ends[-1]
    if x.ndim == 2:
        return pad(_padded_grouped_mm(x[inner], w, edges[1:] - first, dtype), (0, 0, *padding))
    return pad(_padded_grouped_mm(x, w[:, inner], edges[1:] - first, dtype), padding)


@product.register_fake
def _(x: Tensor, w: Tensor, edges: Tensor | None = None, dtype: Any = None) -> Tensor:
    return x.new_empty(_product_shape(x, w, edges))


def _product_shape(x: Tensor, w: Tensor, edges: Tensor | None) -> tuple[int, ...]:
    """Return the shape of the result of ``product``."""
    if x.ndim == w.ndim == 2:
        assert edges is not None
        return edges.shape[0] - 1, x.shape[0], w.shape[1]
    return *(x.shape[:-1] if w.ndim == 3 else x.shape[1:-1]), w.shape[-1]


def _save_operands(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, w, edges, _dtype = inputs
    ctx.save_for_backward(x, w, edges)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, w, edges = ctx.saved_tensors
    needs_x, needs_w, *_ = ctx.needs_input_grad
    return (
        product(grad, w.mT, edges) if needs_x else None,
        product(x.mT, grad, edges) if needs_w else None,
        None,
        None,
    )


product.register_autograd(_product_backward, setup_context=_save_operands)


def _padded_grouped_mm(x: Tensor, w: Tensor, offs: Tensor | None, dtype: Any) -> Tensor:
    """Run torch._grouped_mm on operands that are padded so that its kernel takes them.

    The result is cut to size.
    """
    inner, outer = _row_padding(w.shape[-2], w), _row_padding(w.shape[-1], w)
    padded = _align_strides(pad(x, (0, inner))), _align_strides(pad(w, (0, outer, 0, inner)))
    result = grouped(*padded, offs=offs, out_dtype=dtype)
    return result[..., : w.shape[-1]].contiguous()


def _row_padding(n: int, like: Tensor) -> int:
    """Return how many elements must be added to a row of ``n`` for torch's kernel.

    It takes rows of a multiple of 16 bytes, and at least 16. ``like`` has the dtype.
    """
    step = _ROW_ALIGNMENT // like.element_size()
    return max(step, -(-n // step) * step) - n


def _align_strides(x: Tensor) -> Tensor:
    """Return ``x`` with strides that torch's kernel takes; copy it if needed.

    The kernel takes row-major and column-major matrices whose rows or columns start at multiples of
    16 bytes.
    """
    for along, across in ((-1, -2), (-2, -1)):
        length = x.stride(across)
        is_disjoint = length >= max(1, x.shape[along])
        if x.stride(along) == 1 and is_disjoint and length * x.element_size() % _ROW_ALIGNMENT == 0:
            return x
    return x.contiguous()
