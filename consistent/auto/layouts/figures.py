"""Figures of the machine that the search uses, and the cost of one op or boxing by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...boxing.cost import DEVICES, device_speeds
from ...boxing.plan import plan, plan_bytes
from ...rules.signature import Call
from ...spec import NdSbp, TensorSpec


@dataclass(frozen=True)
class Figures:
    """Speed of one rank, and the cost of moving data.

    Args:
        flops: additions and multiplications per second in products.
        memory: bytes per second that an op reads or writes.
        boxing: function that returns the seconds from one spec to another.
        sending: function that returns the seconds of an op's own message, by its bytes.
        latency: the part of a message's seconds that does not depend on its size.
    """

    flops: float
    memory: float
    boxing: Callable[[TensorSpec, TensorSpec], float]
    sending: Callable[[float], float]
    latency: float


def figures_of(device_type: str) -> Figures:
    """Return the figures of this world's ranks, with the Python time of a message."""
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
    """Return the number of ranks that share the work of an op.

    These are the ranks of the axes that split any of the op's tensors.
    """
    return math.prod(n for a, n in enumerate(grid) if any(sbp[a].is_split for sbp in sbps))


def flops_of(call: Call) -> int:
    """Return the operations of a product on the whole tensors; 0 for ops that only touch memory."""
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
