"""Performance figures of the machine, and the cost of one op or boxing computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..boxing.cost import DEVICES
from ..boxing.plan import plan, plan_bytes
from ..movement.speeds import device_speeds
from ..rules.signature import Call
from ..spec import NdSbp, TensorSpec


@dataclass(frozen=True)
class Figures:
    """Speed of one rank, and functions for the cost of moving data between ranks.

    Args:
        flops: additions and multiplications per second in matrix products.
        memory: memory bandwidth of an op, in bytes read or written per second.
        boxing: function that returns the seconds of a boxing from one spec to another.
        sending: function that returns the seconds of a message of some bytes that an op itself
            sends.
        latency: the part of a message's seconds that does not depend on its size.
    """

    flops: float
    memory: float
    boxing: Callable[[TensorSpec, TensorSpec], float]
    sending: Callable[[float], float]
    latency: float


def figures_of(device_type: str) -> Figures:
    """Return the figures of the ranks of this world.

    The Python time of a message is included in its seconds.
    """
    known, measured = DEVICES[device_type], device_speeds(device_type)
    latency = measured.latency + measured.python

    def boxing(src: TensorSpec, dst: TensorSpec) -> float:
        moves = plan(src, dst)
        seconds = sum(move.seconds_on(measured) for move in moves)
        return seconds + (measured.python if plan_bytes(moves) else 0.0)

    def sending(nbytes: float) -> float:
        return latency + nbytes / measured.bandwidth

    return Figures(known.flops, known.memory, boxing, sending, latency)


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
