"""Hashable descriptions of op calls, by which equal calls are found and calls are made again.

Tensors are described by dtype, sizes and strides, never by values; other arguments are stored as
they are. To measure an op, a machine makes its call again with new tensors that fit the
description. The ``repr`` of a description is the same in every process, so it can be a key in a
file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Like(NamedTuple):
    """Description of a tensor by dtype, sizes and strides, from which one like it can be made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensor touches.

        Memory that several elements share, as in expanded dims and overlapping windows, counts
        once.
        """
        if 0 in self.shape:
            return 0
        dims = [(n, abs(step)) for n, step in zip(self.shape, self.strides) if step]
        span = 1 + sum((n - 1) * step for n, step in dims)
        return min(math.prod(n for n, _ in dims), span) * self.dtype.itemsize


class Same(NamedTuple):
    """Reference to a tensor that was already described, as the second x in ``x * x``.

    ``index`` is the position of the tensor among the distinct tensors of the call; here it is 0.
    """

    index: int


class Many(NamedTuple):
    """An argument or result that is a list or tuple, with the description of each item."""

    items: tuple[Any, ...]


class Plain(NamedTuple):
    """An argument that is a number, a string, a dtype or None.

    ``type`` is the name of its type, because 1, 1.0 and True are equal in Python.
    """

    type: str
    value: Any


class Unknown(NamedTuple):
    """An argument that no description can reproduce, such as a generator."""

    type: str


class OpSignature(NamedTuple):
    """Description of one call: the op's name with its overload, its arguments, and its result.

    Calls with equal descriptions are taken to cost the same. Values are described by ``Like``,
    ``Same``, ``Many``, ``Plain`` and ``Unknown``.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: Any


PLAIN_TYPES = (int, float, bool, complex, str, torch.dtype, torch.layout, torch.memory_format)
_NAN = math.nan  # one object: tuples compare by identity first, and NaN does not equal NaN


def describe_call(op: str, args: tuple, kwargs: dict[str, Any], out: Any) -> OpSignature:
    """Return the description of a call that has been made, without reading its tensors' data.

    Args:
        op: name of the op, such as "aten.mm.default".
        args, kwargs, out: arguments and result of the call.
    """
    describe = _describer()
    arguments = (
        tuple(map(describe, args)),
        tuple((key, describe(value)) for key, value in kwargs.items()),
    )
    return OpSignature(op, *arguments, describe(out))


def _describer() -> Callable[[Any], Any]:
    seen: dict[int, int] = {}

    def describe(x: Any) -> Any:
        if isinstance(x, Tensor):
            count = len(seen)
            index = seen.setdefault(id(x), count)
            return describe_tensor(x) if index == count else Same(index)
        if isinstance(x, (list, tuple)):
            return Many(tuple(map(describe, x)))
        return _plain(x)

    return describe


def describe_tensor(x: Tensor) -> Like | Unknown:
    """Return the description of one tensor."""
    if x.layout is not torch.strided:
        return Unknown(f"{x.layout} tensor")
    return Like(x.dtype, tuple(map(int, x.shape)), tuple(map(int, x.stride())))


def _plain(x: Any) -> Plain | Unknown:
    if x is None or isinstance(x, PLAIN_TYPES):
        return Plain(type(x).__name__, _NAN if isinstance(x, float) and x != x else x)
    if isinstance(x, torch.device):  # a replayed call has its own device
        return Plain("device", None)
    return Unknown(type(x).__name__)


def tensors_of(x: Any) -> list[Like]:
    """Return the tensors' descriptions in ``x``, a description of a call or of an argument.

    A tensor that is passed twice appears once. The result of a call is not included.
    """
    if isinstance(x, Like):
        return [x]
    if isinstance(x, (Many, OpSignature)):
        parts: tuple = x.items if isinstance(x, Many) else (x.args, x.kwargs)
        return [tensor for part in parts for tensor in tensors_of(part)]
    if type(x) is tuple:
        return [tensor for part in x for tensor in tensors_of(part)]
    return []


def is_replayable(x: Any) -> bool:
    """Return whether the call can be made again from its description ``x``.

    It cannot if an argument is ``Unknown``.
    """
    if isinstance(x, OpSignature):
        return is_replayable(x.args) and is_replayable(x.kwargs)
    if isinstance(x, Many):
        return is_replayable(x.items)
    if type(x) is tuple:
        return all(map(is_replayable, x))
    return not isinstance(x, Unknown)
