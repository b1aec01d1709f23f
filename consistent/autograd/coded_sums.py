"""Gradients that ranks sum by a codec, in fewer bytes: which leaves', and what is kept of them."""

from __future__ import annotations

from typing import Any

from ..boxing.steps import Move, Step
from ..dispatch.plans.gradients import settled_spec, summed_axes
from ..dispatch.plans.shards import plain
from ..movement.coders import Coder, by_codec, shorter
from ..movement.low_rank import LowRank
from ..movement.world import my_coordinate
from ..spec import piece

_CODEC = "_grad_codec"  # kept as text, which torch.load(weights_only=True) reads
_CODER = "_grad_coder"  # what is kept is not saved, nor copied (tensor/storage/restored.py)


def sum_by(leaf: Any, codec: str, axis: int) -> None:
    """From now on, gradients of ``leaf`` are summed by ``codec`` along ``axis``, if it makes them
    shorter. What is kept on this rank is as large as the leaf's shard."""
    forget_codec(leaf)
    leaf.__dict__[_CODEC] = f"{axis} {codec}"


def forget_codec(leaf: Any) -> None:
    """Take back what ``sum_by`` said of ``leaf``."""
    leaf.__dict__.pop(_CODEC, None)
    leaf.__dict__.pop(_CODER, None)


def coder_of(leaf: Any) -> Coder | None:
    """The codec of the leaf's gradients, with what was not sent of those before."""
    if _CODEC not in leaf.__dict__:
        return None
    if _CODER not in leaf.__dict__:
        leaf.__dict__[_CODER] = _made(leaf)
    return leaf.__dict__[_CODER]


def axis_of(leaf: Any) -> int:
    """The axis along which the leaf's codec sums."""
    return _said(leaf)[0]


def _said(leaf: Any) -> tuple[int, str]:
    """(axis, codec), as ``sum_by`` was told."""
    axis, _, codec = leaf.__dict__[_CODEC].partition(" ")
    return int(axis), codec


def coded_moves(leaf: Any, moves: tuple[Step, ...]) -> tuple[Step, ...]:
    """The moves of the leaf's gradient, with the bytes that its codec, if it has one, sends."""
    coder = coder_of(leaf)
    if coder is None or coder.reduce is None:
        return moves
    axis, shard = axis_of(leaf), plain(leaf)
    parts = leaf._spec.placement.shape[axis]
    sizes = [piece(shard.numel(), parts, k)[1] for k in range(parts)]
    return tuple(
        by_codec(move, coder.reduce, sizes, tuple(shard.shape))
        if isinstance(move, Move) and move.axis == axis
        else move
        for move in moves
    )


def _made(leaf: Any) -> Coder | None:
    spec = leaf._spec
    axis, name = _said(leaf)
    if my_coordinate(spec.placement) is None or axis not in summed_axes(spec):
        return None
    if settled_spec(leaf) is not spec.settled:
        return None
    shard = plain(leaf).detach()
    codec = shorter(name, spec.dtype, shard.shape)
    if codec is None:
        return None
    coder = Coder(None, codec)
    coder.begin(shard.shape if isinstance(codec, LowRank) else (shard.numel(),), shard)
    return coder
