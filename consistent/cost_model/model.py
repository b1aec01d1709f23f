"""``CostModel``: figures of a machine that a person can check, and the seconds that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from . import messages
from .messages import Wire
from .work import Work

Ranks = tuple[int, ...]
Caller = Literal["forward", "backward", "update"]
# How long the Python process takes, in units of ``host_seconds``. In forward an op is called from
# Python, through modules, and autograd records it; in backward autograd's engine calls it from C++;
# the ops of an optimizer, or those that box a shard, have no graph. A message in forward is the
# boxing of an eager op: planning, autograd, the transport, and waiting for a rank that is late. In
# backward and in an optimizer's step it is sent by hooks that know their plan. Tensors that travel
# in one message are each taken out, gathered or cut, and put back by Python code.
#
# Fitted to forward, backward and optimizer step of 8 models of transformers with 28 to 60
# parameters on two ranks under data, zero1, zero2, zero3 and tensor, where ``host_seconds`` is 4.2
# us: 7.7, 1.2 and 1.8 us an op; 133 us a message in forward and 8 us in the rest; 12 us a tensor.
OP_SHARES: Mapping[Caller, float] = {"forward": 1.8, "backward": 0.3, "update": 0.4}
MESSAGE_OPS: Mapping[Caller, float] = {"forward": 30, "backward": 2, "update": 2}
TENSOR_OPS = 3
# Python time of a pipeline schedule, in units of ``host_seconds``: for each training step, which
# checks whether the recorded program is still valid, and for each action. A pipeline of one stage
# took that much longer than the same model without a pipeline.
STEP_OPS, ACTION_OPS = 150, 40

# The fraction of the peak rate that one matmul reaches, as (seconds that it would take at the peak
# rate, fraction). It was measured for float16 matmuls of cuBLAS with m = n = k of 256, 512, 1024,
# 1536, 2048, 3072 and 4096, as the tutorial "Matrix Multiplication" of Triton's documentation lists
# them in its table "matmul-performance-fp16" (4.1, 26.2, 110, 177, 224, 210 and 220 TFLOP/s). It
# does not name the GPU; the rates are those of an A100, whose peak is 312. 5 microseconds that any
# kernel takes are counted apart. Above 2048 rates go up and down by 5 %: one value for all of them.
CUBLAS = (
    (0.108e-6, 0.034),
    (0.86e-6, 0.164),
    (6.9e-6, 0.476),
    (23e-6, 0.646),
    (55e-6, 0.715),
)


@dataclass(frozen=True)
class CostModel:
    """Identical hosts, each with some devices, and what ops, messages and copies cost on them.

    * A matmul, convolution or attention takes the longer of two times: its flops at (peak x
      efficiency), and its bytes at the memory rate. ``overlap`` below 1 adds the part (1 - overlap)
      of the shorter one.
    * Any other op takes its bytes at the memory rate.
    * Both start ``launch_seconds`` after the device is free.
    * The Python process takes ``host_seconds`` for an op on average, more in forward and less
      elsewhere (``OP_SHARES``). If ``host_overlaps`` (CUDA), it runs ahead of the device, so a step
      takes as long as the slower of the two. On a CPU both are the same processor, so their times
      add up.

    ``messages.py`` has the formulas of messages.
    """

    name: str
    device_type: str  # "cpu" or "cuda"
    ranks_per_host: int  # consecutive ranks of the world on one host, with one device each
    memory_bytes: float  # memory of a device
    # dtype -> flop/s; a dtype that is not listed has the lowest rate
    peak_flops: Mapping[torch.dtype, float] = field(hash=False)
    memory_bytes_per_s: float  # bytes that a device reads + writes
    memory_fraction: float  # fraction of ``memory_bytes_per_s`` that ops reach
    inside: Wire  # links between ranks of one host
    between: Wire  # links between ranks of different hosts
    message_start_s: float  # seconds of any message, in addition to its hops
    launch_seconds: float  # seconds to start any op or copy on the device
    host_seconds: float  # seconds of Python for an op, in the mean over forward and backward
    efficiency: tuple[tuple[float, float], ...] = CUBLAS
    # share of the shorter of an op's flops and memory accesses that runs during the longer
    overlap: float = 1.0

    # ---- summary figures: a message inside a host, a local copy -------------------------------

    @cached_property
    def latency(self) -> float:
        """Seconds before the first byte of a message between ranks of one host arrives."""
        return self.message_start_s + self.inside.latency_s

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends inside a host."""
        return self.inside.bytes_per_s

    @cached_property
    def overhead(self) -> float:
        """Seconds to start one local copy."""
        return self.launch_seconds

    @cached_property
    def memory(self) -> float:
        """Bytes per second of a local copy, and of what an op reads and writes."""
        return self.memory_bytes_per_s * self.memory_fraction

    @property
    def python(self) -> float:
        """Seconds of Python code that a message in forward adds to the time of the message."""
        return self.message_host_seconds("forward")

    def move_seconds(
        self, nbytes: int, local_nbytes: int, name: str = "", ranks: Ranks = ()
    ) -> float:
        """Return the seconds of a step of boxing: its message, and writing its result to memory.

        Args:
            nbytes: bytes that the busiest rank sends.
            local_nbytes: bytes of the largest result on any rank.
            name, ranks: of its message, as for ``message_seconds``. Without ranks, the message
                takes one hop inside a host.
        """
        if not nbytes:
            wire = 0.0
        elif ranks:
            wire = self.message_seconds(name, nbytes, ranks)
        else:
            wire = self.latency + nbytes / self.bandwidth
        return wire + self.overhead + local_nbytes / self.memory

    # ---- ops, messages, Python ------------------------------------------------------------------

    @property
    def host_overlaps(self) -> bool:
        """True if the Python process issues ops ahead of the device that runs them, as on CUDA."""
        return self.device_type == "cuda"

    @property
    def shares_memory(self) -> bool:
        """True if ranks of one host can read each other's memory, as processes on a CPU can."""
        return self.device_type == "cpu"

    def op_host_seconds(self, caller: Caller) -> float:
        """Return the seconds that the process takes for one op: Python, autograd and dispatch.

        Args:
            caller: "forward" (the program), "backward" (autograd's engine) or "update" (what
                optimizers and the library do to shards, without a graph).
        """
        return OP_SHARES[caller] * self.host_seconds

    def message_host_seconds(self, caller: Caller, tensors: int = 1) -> float:
        """Return the seconds of Python code around one message that carries ``tensors`` tensors.

        It is 0 on a machine whose Python runs ahead of the device (CUDA).

        Args:
            caller: as for ``op_host_seconds``.
            tensors: number of tensors in the message.
        """
        ops = MESSAGE_OPS[caller] + TENSOR_OPS * tensors
        return 0.0 if self.host_overlaps else ops * self.host_seconds

    @property
    def schedule_host_seconds(self) -> tuple[float, float]:
        """Seconds of Python of a pipeline schedule: (per training step, per action in it).

        An action is one entry of the schedule, such as the forward of one micro-batch in one stage.
        """
        per_op = 0.0 if self.host_overlaps else self.host_seconds
        return STEP_OPS * per_op, ACTION_OPS * per_op

    @property
    def cache_bytes(self) -> float:
        """One rank's share of the largest cache, in bytes; 0 where costs do not depend on caches.

        Cost models that are measured override it; this one does not model caches.
        """
        return 0.0

    def op_seconds(self, work: Work, cold: float = 0.0) -> float:
        """Return the seconds that the device takes for one op; 0 for a view.

        Args:
            work: the op call.
            cold: share of the op's inputs that is in no cache, 0 to 1. Subclasses that measure use
                it; this estimate from bytes and flops counts all bytes in full.
        """
        if not work.runs:
            return 0.0
        return self.launch_seconds + self.busy_seconds(work)

    def busy_seconds(self, work: Work) -> float:
        """Return the seconds of an op's flops and memory accesses, without the launch.

        It is the longer of both, plus the part of the shorter that does not overlap with it.
        """
        products, memory = self.product_seconds(work), self.touch_seconds(work)
        return max(products, memory) + (1 - self.overlap) * min(products, memory)

    def follow_seconds(self, work: Work) -> float:
        """Return the seconds of Python that a rank outside an op's placement takes for the op.

        Such a rank runs the op on ``meta`` tensors, so that it knows the shapes of the results.
        """
        return self.host_seconds

    def product_seconds(self, work: Work) -> float:
        """Return the seconds of an op's flops, at the rate that an op of its size reaches."""
        if not work.flops:
            return 0.0
        at_peak = work.flops / self.peak(work.dtype)
        return at_peak / self.reached(at_peak)

    def touch_seconds(self, work: Work) -> float:
        """Return the seconds of an op's reads and writes of memory, without its flops."""
        return work.nbytes / self.memory

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak flop/s of a dtype; the lowest rate if it is not listed."""
        return self.peak_flops.get(dtype) or min(self.peak_flops.values())

    def reached(self, seconds_at_peak: float) -> float:
        """Return the fraction of the peak rate that a matmul reaches, lower for short ones.

        ``seconds_at_peak`` is what it would take at the peak rate. The fraction is interpolated, on
        a logarithmic scale, between the measured points of ``efficiency``.
        """
        points = self.efficiency
        if seconds_at_peak <= points[0][0]:  # as the smallest measured product
            return points[0][1] * seconds_at_peak / points[0][0]
        for (a, low), (b, high) in zip(points, points[1:]):
            if seconds_at_peak <= b:
                share = math.log(seconds_at_peak / a) / math.log(b / a)
                return low * (high / low) ** share
        return points[-1][1]

    def message_seconds(self, name: str, nbytes: int, ranks: Ranks) -> float:
        """Return the seconds of one communication; ``messages.py`` describes the model.

        Args:
            name: "all_reduce", "all_gather", "all_to_all", "exchange", "send", "broadcast" or
                "gather_objects", as ``mirrored.transports.counting`` counts calls.
            nbytes: bytes that the busiest of the ranks sends, as ``mirrored.transports.counting``
                counts them.
            ranks: ranks of the world that take part.
        """
        return messages.seconds(self, name, nbytes, ranks)

    def links(self, ranks: Ranks) -> tuple[str, ...]:
        """Return the links that a message between these ranks takes.

        ``("inside",)`` if all are on one host, ``("between",)`` if each is on its own, else both.
        """
        return messages.links(self, ranks)
