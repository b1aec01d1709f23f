"""Joining tensors: a split along another dim than the joined one stays; P passes if all are P."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..spec import P, S
from .signature import Call, Operand, Signature
from .strides import places
from .table import Row, add_rows

# What the op does to each tensor before it joins them along the dim of the second table.
_RAISED = {
    "column_stack": lambda x: x.unsqueeze(1) if x.ndim == 1 else x,
    "dstack": torch.atleast_3d,
    "hstack": torch.atleast_1d,
    "row_stack": torch.atleast_2d,
    "vstack": torch.atleast_2d,
}
_JOINED = {"column_stack": 1, "dstack": 2, "hstack": 1, "row_stack": 0, "vstack": 0}


def _joined(call: Call, moves: Mapping[int, int]) -> list[Signature]:
    every = [i for i, operand in enumerate(call.operands) if not _skipped(call, operand)]
    made = [call.whole(), call.make(dict.fromkeys(every, P), P)]
    return made + [call.make(dict.fromkeys(every, S(d)), S(place)) for d, place in moves.items()]


def _skipped(call: Call, operand: Operand) -> bool:
    """Whether torch passes over ``operand``: cat takes an empty vector among any tensors."""
    return operand.shape == (0,) and any(other.shape != (0,) for other in call.operands)


def _ndim(call: Call) -> int:
    """Number of dims of all the tensors that count."""
    tensors: Sequence[Operand] = call.get("tensors")
    (n,) = {operand.ndim for operand in tensors if not _skipped(call, operand)}
    return n


def joined(call: Call, parts: int) -> list[Signature]:
    """cat: along a dim that is there."""
    n = _ndim(call)
    dim = call.dim("dim", 0, ndim=n)
    return _joined(call, {d: d for d in range(n) if d != dim})


def stacked(call: Call, parts: int) -> list[Signature]:
    """stack: along a new dim."""
    n = _ndim(call)
    dim = call.dim("dim", 0, ndim=n + 1)
    return _joined(call, {d: d + (d >= dim) for d in range(n)})


def joined_by_name(call: Call, parts: int) -> list[Signature]:
    """hstack and its kin."""
    n = _ndim(call)
    joint = 0 if call.name == "hstack" and n <= 1 else _JOINED[call.name]
    found = places(_RAISED[call.name], call.operands[0].shape)
    if n and not all(
        places(_RAISED[call.name], o.shape).keys() == found.keys() for o in call.operands
    ):
        raise ValueError("sizes of 1 in some operands only")
    return _joined(call, {d: place for d, (place,) in found.items() if place != joint})


ROWS = (
    Row("cat concat concatenate", joined, "tensors dim"),
    Row("column_stack dstack hstack row_stack vstack", joined_by_name, "tensors"),
    Row("stack", stacked, "tensors dim"),
)  # fmt: skip

add_rows(ROWS)
