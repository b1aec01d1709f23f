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
    """Return the ranks along a mesh axis at coordinate 0 of the other axes.

    Costs of messages along the axis are estimated for this group alone.
    """
    return placement.axis_ranks(axis, (0,) * placement.ndim)


@lru_cache(maxsize=1 << 10)
def _ranks_of_placements(*placements: Placement) -> Ranks:
    """Return all ranks of some placements, in ascending order."""
    return tuple(sorted({int(rank) for each in placements for rank in each.ranks.ravel()}))


def _ranks_of_step(step: Step, placement: Placement) -> Ranks:
    """Return the ranks that exchange messages in a step of boxing, for the cost of their links."""
    if isinstance(step, Exchange):
        return _ranks_of_placements(step.src.placement, step.dst.placement)
    return axis_ranks(placement, step.axis)


def sending_seconds(costs: CostModel, placement: Placement, sent: Sequence[int]) -> float:
    """Return the seconds of the messages that an op itself sends; 0 if it sends none.

    Its form (the local code that runs in place of the op) sends them. ``sent`` has their bytes for
    each mesh axis, which are counted as one message over the slowest of the axes that send.
    """
    axes = [axis for axis, nbytes in enumerate(sent) if nbytes]
    if not axes:
        return 0.0
    groups = (axis_ranks(placement, axis) for axis in axes)
    slowest = max(costs.message_seconds("all_gather", sum(sent), ranks) for ranks in groups)
    return slowest + costs.python


def boxing_seconds_on(costs: CostModel, src: TensorSpec, dst: TensorSpec) -> float:
    """Return the seconds of boxing a value from ``src`` to ``dst`` on the machine of ``costs``.

    They include the time of Python for starting its messages.
    """
    seconds, moves, placement = 0.0, plan(src, dst), src.placement
    for move in moves:
        seconds += move.seconds_on(costs, _ranks_of_step(move, placement))
        placement = move.dst.placement if isinstance(move, Exchange) else placement
    return seconds + (costs.python if plan_bytes(moves) else 0.0)


def start_seconds(costs: CostModel, src: TensorSpec, dst: TensorSpec) -> float:
    """Return the seconds to start the slowest message of boxing ``src`` to ``dst``; 0 without one.

    If boxings of several tensors are sent as one message, they share this time.
    """
    starts = [
        costs.message_seconds(move.message, 0, _ranks_of_step(move, src.placement))
        for move in plan(src, dst)
        if move.nbytes
    ]
    return max(starts) + costs.python if starts else 0.0


def work_divisor(grid: Sequence[int], sbps: Sequence[NdSbp]) -> int:
    """Return among how many ranks the work of an op is divided.

    A mesh axis divides the work if any of the op's tensors is split along it; on other axes all
    ranks compute the same. On a (2, 4) grid with splits along the second axis alone it is 4.

    Args:
        grid: the size of each mesh axis.
        sbps: the nd-sbps of the op's operands and results.
    """
    return math.prod(n for a, n in enumerate(grid) if any(sbp[a].is_split for sbp in sbps))


def flops_of(call: Call) -> int:
    """Return the floating-point operations of an op on the unsharded tensors.

    Only matmul, convolution, attention and the like have any. Other ops give 0: their time is that
    of reading and writing memory.
    """
    formula = _FORMULAS.get(call.name)
    if formula is None or not call.outs or len(call.operands) < 2:
        return 0
    return formula([operand.shape for operand in call.operands], call.outs[0].shape)


def _matmul_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.contraction(shapes[0], -1, out) if shapes[0] else 0


def _addmm_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.contraction(shapes[1], -1, out) if shapes[1] else 0


def _einsum_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.einsum(shapes[0], shapes[1], out)


def _attention_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.attention(*shapes[:3])


def _convolution_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.convolution(shapes[0], shapes[1], out, False)


def _conv_tbc_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    """Return the flops of conv_tbc, whose weight is (taps, channels in, channels out)."""
    # The order of conv_tbc, unlike that of other convolutions.
    x, (taps, in_channels, out_channels) = shapes[0], shapes[1]
    return flops.convolution(x, (out_channels, taps, in_channels), out, False)


def _transposed_convolution_flops(shapes: Sequence[flops.Shape], out: flops.Shape) -> int:
    return flops.convolution(shapes[0], shapes[1], out, True)


# Name of a global op -> flops by the shapes of its operands and of its first result.
_FORMULAS: dict[str, Callable[[Sequence[flops.Shape], flops.Shape], int]] = {
    **dict.fromkeys("mm matmul bmm linear mv dot".split(), _matmul_flops),
    **dict.fromkeys("addmm baddbmm addbmm addmv".split(), _addmm_flops),
    **dict.fromkeys("einsum tensordot bilinear inner".split(), _einsum_flops),
    **{f"conv{n}d": _convolution_flops for n in (1, 2, 3)},
    "convolution": _convolution_flops,
    "conv_tbc": _conv_tbc_flops,
    **{f"conv_transpose{n}d": _transposed_convolution_flops for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention_flops,
}
