"""Cost of one op or boxing on a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from ..boxing.plan import plan, plan_bytes
from ..boxing.steps import Exchange, Step
from ..cost_model import flops
from ..cost_model.model import CostModel, Ranks
from ..rules.signature import Call
from ..spec import NdSbp, Placement, TensorSpec


@lru_cache(maxsize=1 << 10)
def axis_ranks(placement: Placement, axis: int) -> Ranks:
    """Return the ranks of the first group along a mesh axis, which stands for all of its groups."""
    return placement.axis_ranks(axis, (0,) * placement.ndim)


@lru_cache(maxsize=1 << 10)
def _ranks_of(*placements: Placement) -> Ranks:
    return tuple(sorted({int(rank) for each in placements for rank in each.ranks.ravel()}))


def _taking_part(step: Step, placement: Placement) -> Ranks:
    if isinstance(step, Exchange):
        return _ranks_of(step.src.placement, step.dst.placement)
    return axis_ranks(placement, step.axis)


def sending_seconds(costs: CostModel, placement: Placement, sent: Sequence[int]) -> float:
    """Return the seconds of the message that an op itself sends.

    ``sent`` has the bytes for each mesh axis. They are counted as one message over the slowest of
    the axes.
    """
    axes = [axis for axis, nbytes in enumerate(sent) if nbytes]
    if not axes:
        return 0.0
    groups = (axis_ranks(placement, axis) for axis in axes)
    slowest = max(costs.message_seconds("all_gather", sum(sent), ranks) for ranks in groups)
    return slowest + costs.python


def boxing_seconds_on(costs: CostModel, src: TensorSpec, dst: TensorSpec) -> float:
    """Return the seconds of boxing from ``src`` to ``dst``, with the Python time of its
    messages."""
    seconds, moves, placement = 0.0, plan(src, dst), src.placement
    for move in moves:
        seconds += move.seconds_on(costs, _taking_part(move, placement))
        placement = move.dst.placement if isinstance(move, Exchange) else placement
    return seconds + (costs.python if plan_bytes(moves) else 0.0)


def start_seconds(costs: CostModel, src: TensorSpec, dst: TensorSpec) -> float:
    """Return the part of the seconds of boxing from ``src`` to ``dst`` that messages of several
    tensors share: the start of the slowest message, with its Python time."""
    starts = [
        costs.message_seconds(move.message, 0, _taking_part(move, src.placement))
        for move in plan(src, dst)
        if move.nbytes
    ]
    return max(starts) + costs.python if starts else 0.0


def shares(grid: Sequence[int], sbps: Sequence[NdSbp]) -> int:
    """Return among how many ranks the work of an op is divided.

    A mesh axis divides the work if any of the op's tensors is split along it; on other axes all
    ranks compute the same. ``grid`` has the size of each axis.
    """
    return math.prod(n for a, n in enumerate(grid) if any(sbp[a].is_split for sbp in sbps))


def flops_of(call: Call) -> int:
    """Return the additions and multiplications of a matrix product on the logical (unsharded)
    tensors.

    The result is 0 for ops that are limited by memory alone.
    """
    formula = _FORMULAS.get(call.name)
    if formula is None or not call.outs or len(call.operands) < 2:
        return 0
    return formula([operand.shape for operand in call.operands], call.outs[0].shape)


def _first(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.contraction(shapes[0], -1, out) if shapes[0] else 0


def _second(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.contraction(shapes[1], -1, out) if shapes[1] else 0


def _letters(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.einsum(shapes[0], shapes[1], out)


def _attention(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.attention(*shapes[:3])


def _convolution(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.convolution(shapes[0], shapes[1], out, False)


def _by_time(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    x, (steps, channels, made) = shapes[0], shapes[1]  # of conv_tbc, unlike other convolutions
    return flops.convolution(x, (made, steps, channels), out, False)


def _transposed(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.convolution(shapes[0], shapes[1], out, True)


# Name of a global op -> flops by the shapes of its operands and of its first result.
_FORMULAS: dict[str, Callable[[Sequence[flops.Shape], flops.Shape], int]] = {
    **dict.fromkeys("mm matmul bmm linear mv dot".split(), _first),
    **dict.fromkeys("addmm baddbmm addbmm addmv".split(), _second),
    **dict.fromkeys("einsum tensordot bilinear inner".split(), _letters),
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    "convolution": _convolution,
    "conv_tbc": _by_time,
    **{f"conv_transpose{n}d": _transposed for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention,
}
