"""Substitutes for tensor values that a simulated program reads, since its tensors have none.

Floats are taken for 0 and booleans for False, and each read is logged. If a value decides the size
of a result (masks, ``nonzero``), a bound on the size must be given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mirrored.transports.faults.place import user_line

from ...graph.reads import result_by_values
from ...spec.nested import map_tensors
from .log import Log
from .shapes import ResultShape, ShapeCache

_aten = torch.ops.aten
_T = torch.Tensor
_DisableTorchFunction = torch._C.DisableTorchFunction
_READ_OPS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default)
_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Values:
    """Source of substitutes for the values that a simulated program reads.

    Args:
        log: notes each such read.
        bound: share of the input, above 0 and at most 1, that an op keeps if the size of its result
            depends on values that are not known; if None, such ops raise.
        value_of: function of a tensor that returns it if it has values, and None if it has not.
    """

    def __init__(
        self, log: Log, bound: float | None, value_of: Callable[[Tensor], Tensor | None]
    ) -> None:
        self._log, self._bound, self._value_of = log, bound, value_of

    def reads(self, func: Any) -> bool:
        """Return whether the op returns a value to Python, as ``item()`` does."""
        return func in _READ_OPS

    def read(self, func: Any, args: tuple) -> Any:
        """Return the substitute for the value that the op returns to Python: 0.0 or False.

        Raises:
            RuntimeError: the value is an integer, and sizes may depend on it.
        """
        x = args[0]
        if func is _aten._local_scalar_dense.default and x.dtype in _INTEGER_DTYPES:
            raise _unknown_size("item() of a whole number")
        self._log.note_read(f"{str(func).partition('.')[2].partition('.')[0]} at {user_line()}")
        return 0.0 if func is _aten._local_scalar_dense.default and x.is_floating_point() else False

    def is_sized(self, func: Any, args: tuple) -> bool:
        """Return whether the size of the op's result depends on values."""
        return func in _VALUE_SIZED_OPS and (func is not _aten.index.Tensor or _has_mask(args[1]))

    def shape_of(self, func: Any, args: tuple, kwargs: dict[str, Any], shapes: ShapeCache) -> Any:
        """Return the results of an op, with a ``ResultShape`` in place of each tensor.

        Where a size depends on values that are not known, the share ``bound`` of the largest
        possible size is taken.

        Raises:
            RuntimeError: the size depends on values and there is no bound, or torch does not know
                the shape.
        """
        if self.is_sized(func, args):
            known = result_by_values(func, (args, kwargs), self._value_of)
            if known is not None:
                return map_tensors(known, lambda x: _contiguous_shape(list(x.shape), x.dtype))
            if self._bound is None:
                raise _unknown_size(str(func))
            return _VALUE_SIZED_OPS[func](self._bound, *args, **kwargs)
        try:
            return shapes.result_shapes(func, args, kwargs)
        except NotImplementedError as error:
            raise RuntimeError(
                f"simulate: at {user_line()}, torch does not say what {func} gives without values."
                "\n  A simulated program has no values.\n"
                "  Leave that part out of the simulated program."
            ) from error


def _unknown_size(what: str) -> RuntimeError:
    return RuntimeError(
        f"simulate: at {user_line()}, {what} decides a size by values, and a simulated program has "
        "none.\n  How much it keeps is not known.\n"
        "  Say it: simulate(..., bound=0.5) if about half of the elements are kept."
    )


def _has_mask(indices: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _kept_count(bound: float, numel: int) -> int:
    return math.ceil(bound * numel)


def _contiguous_shape(size: list[int], dtype: torch.dtype) -> ResultShape:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return ResultShape(tuple(size), tuple(reversed(strides)), dtype)


def _nonzero_shape(bound: float, x: Any) -> ResultShape:
    return _contiguous_shape([_kept_count(bound, x.numel()), x.dim()], torch.int64)


def _masked_select_shape(bound: float, x: Any, mask: Any) -> ResultShape:
    shape = torch.broadcast_shapes(_T.size(x), _T.size(mask))
    return _contiguous_shape([_kept_count(bound, math.prod(shape))], x.dtype)


def _index_shape(bound: float, x: Any, indices: Any) -> ResultShape:
    size, dim, result = list(_T.size(x)), 0, []
    spans: list[tuple[int, int]] = []  # (begin, end) in dims of x, of each index
    shapes: list[Any] = []
    for index in indices:
        width = 1 if index is None or index.dtype not in (torch.bool, torch.uint8) else index.dim()
        if index is not None:
            spans.append((dim, dim + width))
            mask = index.dtype in (torch.bool, torch.uint8)
            shapes.append((_kept_count(bound, index.numel()),) if mask else tuple(_T.size(index)))
        dim += width
    is_adjacent = all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
    indexed_dims = {d for a, b in spans for d in range(a, b)}
    other_dims = [(d, n) for d, n in enumerate(size) if d not in indexed_dims]
    # As in advanced indexing: indexed dims that are not adjacent move to the front.
    first_dim = spans[0][0] if is_adjacent else 0
    broadcast_size = list(torch.broadcast_shapes(*shapes))
    result = [n for d, n in other_dims if is_adjacent and d < first_dim] + broadcast_size
    result += [n for d, n in other_dims if not is_adjacent or d >= first_dim]
    return _contiguous_shape(result, x.dtype)


def _unique_shapes(bound: float, x: Any, *_: Any, **__: Any) -> tuple:
    return (
        _contiguous_shape([_kept_count(bound, x.numel())], x.dtype),
        _contiguous_shape(list(_T.size(x)), torch.int64),
        _contiguous_shape([_kept_count(bound, x.numel())], torch.int64),
    )


_VALUE_SIZED_OPS = {
    _aten.nonzero.default: _nonzero_shape,
    _aten.masked_select.default: _masked_select_shape,
    _aten.index.Tensor: _index_shape,
    _aten._unique2.default: _unique_shapes,
}
_READ_METHODS = frozenset(
    getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")
)


class ReadRecorder(TorchFunctionMode):
    """Torch function mode that notices methods, such as ``tolist()``, that read values.

    Such a method runs no op that a dispatch mode would see. On a tensor without values, the read is
    logged, and a read of integers raises.
    """

    def __init__(self, memory: Any, log: Log) -> None:
        super().__init__()
        self._memory, self._log = memory, log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READ_METHODS and self._memory.number(args[0]) is not None:
            if args[0].dtype in _INTEGER_DTYPES:
                raise _unknown_size(f"{func.__name__}() of whole numbers")
            self._log.note_read(f"{func.__name__} at {user_line()}")
        return func(*args, **(kwargs or {}))
