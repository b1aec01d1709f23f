"""Form of scaled float8 matmuls, whose kernels accept only some strides and lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ....rules.signature import Operand
from ...registry import Shards, form

_COLUMN_MULTIPLE = 16  # the number of columns of a product must be a multiple of this


@form("scaled_mm")
def scaled_mm(shard: Shards) -> Tensor:
    """Run torch._scaled_mm on this rank's shards, padded to a number of columns its kernel accepts.

    cuBLAS requires a row-major first and a column-major second matrix, and shards that were
    received are row-major, so they are copied if needed.
    """
    x, w, *rest = shard.tensors
    rows, columns = shard.out_shape()
    if rows * columns == 0:  # cuBLAS rejects empty products
        return x.new_empty((rows, columns), dtype=shard.outs[0].dtype)
    padding = -columns % _COLUMN_MULTIPLE
    if padding:
        w = pad(w, (0, padding))
        has_columns = [columns > 1 and t.ndim > 0 and t.shape[-1] == columns for t in rest]
        rest = [pad(t, (0, padding)) if a else t for t, a in zip(rest, has_columns, strict=True)]
    tensors = [_dense_along(x, 1), _dense_along(w, 0), *rest]
    args = _replace_operands(shard.call.args, tensors)
    result = shard.run(*args, **_replace_operands(dict(shard.call.kwargs), tensors))
    return result[:, :columns].contiguous() if padding else result


def _dense_along(x: Tensor, dim: int) -> Tensor:
    """Return the matrix ``x`` with stride 1 along ``dim``; copy it if needed."""
    if x.stride(dim) == 1:
        return x
    return x.contiguous() if dim == 1 else x.t().contiguous().t()


def _replace_operands(value: Any, tensors: list[Tensor]) -> Any:
    """Return ``value`` with each ``Operand`` placeholder replaced by its tensor."""
    if isinstance(value, Operand):
        return tensors[value.index]
    if isinstance(value, list | tuple):
        return type(value)(_replace_operands(each, tensors) for each in value)
    if isinstance(value, dict):
        return {key: _replace_operands(each, tensors) for key, each in value.items()}
    return value
