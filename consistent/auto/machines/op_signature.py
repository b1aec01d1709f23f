"""A call of an op as a hashable description: its tensors by dtype, sizes and strides, never by
their values, and everything else as it is.

A machine that measures makes the call again from it. Its ``repr`` is the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Like(NamedTuple):
    """A tensor of these sizes and strides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it touches: an expanded dim counts once, and windows that
        overlap count once."""
        if 0 in self.shape:
            return 0
        dims = [(n, abs(step)) for n, step in zip(self.shape, self.strides) if step]
        span = 1 + sum((n - 1) * step for n, step in dims)
        return min(math.prod(n for n, _ in dims), span) * self.dtype.itemsize


class Same(NamedTuple):
    """The tensor that was the k-th one of the call: it is passed twice, as in `x * x`."""

    index: int


class Many(NamedTuple):
    """A list or tuple."""

    items: tuple[Any, ...]


class Plain(NamedTuple):
    """A number, a word, a dtype or None. Its type is part of it, since 1 equals 1.0 and True."""

    type: str
    value: Any


class Unknown(NamedTuple):
    """Something that cannot be made again from a description, a generator say."""

    type: str


class OpSignature(NamedTuple):
    """One call: the op's name with its overload, what it was given, and what it returned."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: Any


PLAIN = (int, float, bool, complex, str, torch.dtype, torch.layout, torch.memory_format)
_NAN = math.nan  # one object, since a tuple that holds it equals itself only then


def described(op: str, args: tuple, kwargs: dict[str, Any], out: Any) -> OpSignature:
    """The description of a call that has been made. The data of its tensors are not read."""
    of = _describer()
    given = tuple(map(of, args)), tuple((key, of(value)) for key, value in kwargs.items())
    return OpSignature(op, *given, of(out))


def _describer() -> Callable[[Any], Any]:
    seen: dict[int, int] = {}

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            count = len(seen)
            index = seen.setdefault(id(x), count)
            return like(x) if index == count else Same(index)
        if isinstance(x, (list, tuple)):
            return Many(tuple(map(of, x)))
        return _plain(x)

    return of


def like(x: Tensor) -> Like | Unknown:
    """The description of one tensor."""
    if x.layout is not torch.strided:
        return Unknown(f"{x.layout} tensor")
    return Like(x.dtype, tuple(map(int, x.shape)), tuple(map(int, x.stride())))


def _plain(x: Any) -> Plain | Unknown:
    if x is None or isinstance(x, PLAIN):
        return Plain(type(x).__name__, _NAN if isinstance(x, float) and x != x else x)
    if isinstance(x, torch.device):  # a machine runs it on its own device
        return Plain("device", None)
    return Unknown(type(x).__name__)


def tensors(x: Any) -> list[Like]:
    """The tensors within a description, those that are passed twice once."""
    if isinstance(x, Like):
        return [x]
    if isinstance(x, (Many, OpSignature)):
        parts: tuple = x.items if isinstance(x, Many) else (x.args, x.kwargs)
        return [each for part in parts for each in tensors(part)]
    if type(x) is tuple:
        return [each for part in x for each in tensors(part)]
    return []


def is_known(x: Any) -> bool:
    """Whether the call can be made again."""
    if isinstance(x, OpSignature):
        return is_known(x.args) and is_known(x.kwargs)
    if isinstance(x, Many):
        return is_known(x.items)
    if type(x) is tuple:
        return all(map(is_known, x))
    return not isinstance(x, Unknown)
