"""Gradients that a codec compresses for their sum over ranks, and its state per leaf."""

from __future__ import annotations

from typing import Any

from ..boxing.steps import Move, Step
from ..dispatch.plans.gradients import settled_spec, summed_axes
from ..dispatch.plans.shards import plain
from ..movement.coders import Coder, codec_if_smaller, with_coded_bytes
from ..movement.low_rank import LowRank
from ..movement.world import my_coordinate
from ..spec import piece

_CODEC_KEY = "_grad_codec"  # stored as a string, since torch.load(weights_only=True) loads strings
# The coder's state is neither saved nor copied (tensor/storage/restored.py).
_CODER_KEY = "_grad_coder"


def set_codec(leaf: Any, codec: str, axis: int) -> None:
    """Compress the gradients of ``leaf`` by ``codec`` where they are summed along ``axis``.

    It holds from the next backward on, if it saves bytes. The state that this rank keeps for it is
    as large as the leaf's shard. ``codec`` is a name such as "int8".
    """
    forget_codec(leaf)
    leaf.__dict__[_CODEC_KEY] = f"{axis} {codec}"


def forget_codec(leaf: Any) -> None:
    """Undo ``set_codec`` for ``leaf``."""
    leaf.__dict__.pop(_CODEC_KEY, None)
    leaf.__dict__.pop(_CODER_KEY, None)


def coder_of(leaf: Any) -> Coder | None:
    """Return the ``Coder`` that compresses the leaf's gradients, or None if they are sent in full.

    A coder is a codec with state, made at the first call: the rounding errors of earlier gradients,
    which are added to the next one.
    """
    if _CODEC_KEY not in leaf.__dict__:
        return None
    if _CODER_KEY not in leaf.__dict__:
        leaf.__dict__[_CODER_KEY] = _new_coder(leaf)
    coder = leaf.__dict__[_CODER_KEY]
    if coder is not None:
        coder.begin(leaf)
    return coder


def axis_of(leaf: Any) -> int:
    """Return the axis along which the leaf's codec sums, as passed to ``set_codec``."""
    return _axis_and_codec(leaf)[0]


def _axis_and_codec(leaf: Any) -> tuple[int, str]:
    """Return (axis, name of the codec) as passed to ``set_codec``."""
    axis, _, codec = leaf.__dict__[_CODEC_KEY].partition(" ")
    return int(axis), codec


def coded_moves(leaf: Any, moves: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return ``moves``, the boxing of the leaf's gradient, with the bytes that are really sent.

    Tracers get them. The moves along the axis of the leaf's codec send fewer bytes by it.
    """
    coder = coder_of(leaf)
    if coder is None or coder.reduce is None:
        return moves
    axis, shard = axis_of(leaf), plain(leaf)
    parts = leaf._spec.placement.shape[axis]
    sizes = [piece(shard.numel(), parts, k)[1] for k in range(parts)]
    return tuple(
        with_coded_bytes(move, coder.reduce, sizes, tuple(shard.shape))
        if isinstance(move, Move) and move.axis == axis
        else move
        for move in moves
    )


def _new_coder(leaf: Any) -> Coder | None:
    """Return a new coder for ``leaf``, or None if its codec does not apply or saves nothing."""
    spec = leaf._spec
    axis, name = _axis_and_codec(leaf)
    if my_coordinate(spec.placement) is None or axis not in summed_axes(spec):
        return None
    # A gradient with a layout of its own is boxed to it directly, not summed in a bucket.
    if settled_spec(leaf) is not spec.settled:
        return None
    shard = plain(leaf).detach()
    codec = codec_if_smaller(name, spec.dtype, shard.shape)
    if codec is None:
        return None
    return Coder(None, codec, shard.shape if isinstance(codec, LowRank) else (shard.numel(),))
