"""Form of scaled float8 matrix products, whose kernels accept only some strides and lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ....rules.signature import Operand
from ...registry import Shards, form

_COLUMNS = 16  # the number of columns of a product must be a multiple of this


@form("scaled_mm")
def scaled_mm(shard: Shards) -> Tensor:
    """Run torch._scaled_mm on this rank's shards, padded to the columns that its kernel takes.

    cuBLAS requires a row-major first and a column-major second matrix, and shards that were
    received are row-major, so they are copied if needed.
    """
    x, w, *rest = shard.tensors
    rows, columns = shard.out_shape()
    if rows * columns == 0:  # cuBLAS rejects empty products
        return x.new_empty((rows, columns), dtype=shard.outs[0].dtype)
    missing = -columns % _COLUMNS
    if missing:
        w = pad(w, (0, missing))
        along = [columns > 1 and t.ndim > 0 and t.shape[-1] == columns for t in rest]
        rest = [pad(t, (0, missing)) if a else t for t, a in zip(rest, along, strict=True)]
    tensors = [_along(x, 1), _along(w, 0), *rest]
    args = _filled_in(shard.call.args, tensors)
    made = shard.run(*args, **_filled_in(dict(shard.call.kwargs), tensors))
    return made[:, :columns].contiguous() if missing else made


def _along(x: Tensor, dim: int) -> Tensor:
    """Return the matrix ``x`` with stride 1 along ``dim``; copy it if needed."""
    if x.stride(dim) == 1:
        return x
    return x.contiguous() if dim == 1 else x.t().contiguous().t()


def _filled_in(value: Any, tensors: list[Tensor]) -> Any:
    """Return ``value`` with each ``Operand`` placeholder replaced by its tensor."""
    if isinstance(value, Operand):
        return tensors[value.index]
    if isinstance(value, list | tuple):
        return type(value)(_filled_in(each, tensors) for each in value)
    if isinstance(value, dict):
        return {key: _filled_in(each, tensors) for key, each in value.items()}
    return value
