"""Cost of one op or boxing on devices of some speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..boxing.cost import Device
from ..boxing.plan import plan, plan_bytes
from ..rules.signature import Call
from ..spec import NdSbp, TensorSpec


def start_seconds(device: Device) -> float:
    """Return the part of a message's seconds that does not depend on its size, with the Python time
    of the message."""
    return device.latency + device.python


def sending_seconds(device: Device, nbytes: float) -> float:
    """Return the seconds of a message of ``nbytes`` that an op itself sends."""
    return start_seconds(device) + nbytes / device.bandwidth


def boxing_seconds_on(device: Device, src: TensorSpec, dst: TensorSpec) -> float:
    """Return the seconds of boxing from ``src`` to ``dst``, with the Python time of its
    messages."""
    moves = plan(src, dst)
    seconds = sum(move.seconds_on(device) for move in moves)
    return seconds + (device.python if plan_bytes(moves) else 0.0)


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
    shapes = [operand.shape for operand in call.operands]
    if not call.outs or len(shapes) < 2:
        return 0
    out = call.outs[0].shape.numel()
    if call.name in ("mm", "matmul", "bmm", "linear", "mv", "dot") and shapes[0]:
        return 2 * out * shapes[0][-1]
    if call.name in ("addmm", "baddbmm", "addbmm", "addmv") and shapes[1]:
        return 2 * out * shapes[1][-1]
    if call.name == "scaled_dot_product_attention":
        return 4 * out * shapes[1][-2]
    if call.name.startswith("conv") and shapes[1]:
        return 2 * out * (shapes[1].numel() // shapes[1][0])
    if call.name in ("einsum", "tensordot", "bilinear", "inner"):
        # Each letter of a product is in two of the three tensors, so the product of the three sizes
        # is the square of the product of the letters' lengths.
        return 2 * math.isqrt(out * shapes[0].numel() * shapes[1].numel())
    return 0
