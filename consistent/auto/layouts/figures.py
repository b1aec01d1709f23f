"""The machine as the search sees it: a few figures, and what they say of one op or boxing."""

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
    """What one rank does in a second, and what moving data takes.

    Args:
        flops: additions and multiplications a second in products.
        memory: bytes a second that an op reads or writes.
        boxing: seconds from one spec to another.
        sending: seconds for an op's own message of so many bytes.
        latency: the part of a message's seconds that does not depend on its size.
    """

    flops: float
    memory: float
    boxing: Callable[[TensorSpec, TensorSpec], float]
    sending: Callable[[float], float]
    latency: float


def figures_of(device_type: str) -> Figures:
    """The figures of this world's ranks, with what Python takes for a message."""
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
    """Among how many ranks the work of an op is shared: those of the axes that split any of its
    tensors."""
    return math.prod(n for a, n in enumerate(grid) if any(sbp[a].is_split for sbp in sbps))


def flops_of(call: Call) -> int:
    """Operations of a product on the whole tensors; 0 for ops that touch memory only."""
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
        # The letters of a product are each in two of three tensors.
        return 2 * math.isqrt(out * shapes[0].numel() * shapes[1].numel())
    return 0
