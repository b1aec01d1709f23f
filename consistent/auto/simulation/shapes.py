"""Cache of the shapes of op results, which torch's ``meta`` kernels compute once per kind of
call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

_META = torch.device("meta")
# Ops whose ``meta`` kernels accept only bfloat16, although device kernels accept more.
_BFLOAT16 = frozenset((torch.ops.aten._grouped_mm.default,))
_T = torch.Tensor


@dataclass(frozen=True, slots=True)
class ResultShape:
    """Size, stride and dtype of a tensor that an op returns, from which an imagined one is made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for n in self.size:
            count *= n
        return count


class ShapeCache:
    """Cache of the results of op calls, as descriptions (``ResultShape``).

    The key of a call has the op, the sizes, strides and dtypes of its tensors, and all other
    arguments.
    """

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}

    def result_shapes(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the results of the call, with ``ResultShape`` in place of tensors.

        Raises:
            NotImplementedError: torch does not know the results without values.
        """
        key = func, _key(args), _key(kwargs)
        try:
            return self._results[key]
        except KeyError:
            result = self._results[key] = self._run_on_meta(func, args, kwargs)
            return result
        except TypeError:  # an argument that is not hashable
            return self._run_on_meta(func, args, kwargs)

    def _run_on_meta(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        metas: dict[int, torch.Tensor] = {}
        kernel_dtype = torch.bfloat16 if func in _BFLOAT16 else None

        def meta(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                if id(x) not in metas:
                    dtype = kernel_dtype if kernel_dtype and x.is_floating_point() else x.dtype
                    metas[id(x)] = torch.empty_strided(
                        _T.size(x), _T.stride(x), dtype=dtype, device=_META
                    )
                return metas[id(x)]
            return _META if isinstance(x, torch.device) else x

        meta_args, meta_kwargs = (
            map_leaves(args, meta),
            {k: map_leaves(v, meta) for k, v in kwargs.items()},
        )
        if any(a.name == "device" for a in func._schema.arguments):
            meta_kwargs["device"] = _META
        result = map_leaves(func(*meta_args, **meta_kwargs), _result_shape)
        return replace(result, dtype=args[0].dtype) if kernel_dtype else result


def _result_shape(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return ResultShape(tuple(_T.size(x)), tuple(_T.stride(x)), x.dtype)
    return x


def map_leaves(value: Any, f: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``f`` applied to every leaf of its lists, tuples and dicts.

    Example: ``map_leaves([1, (2, None)], str)`` returns ``["1", ("2", "None")]``.
    """
    if type(value) is list or type(value) is tuple:
        return type(value)([map_leaves(x, f) for x in value])
    if type(value) is dict:
        return {k: map_leaves(x, f) for k, x in value.items()}
    return f(value)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(_T.size(value)), tuple(_T.stride(value)), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(x) for x in value])
    if isinstance(value, dict):
        return tuple([(k, _key(x)) for k, x in value.items()])
    if isinstance(value, torch.Generator):
        return "generator"
    return type(value), value
