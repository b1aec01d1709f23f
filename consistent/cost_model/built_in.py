"""The built-in figures of a rank of each device type.

They alone decide which layouts an op gets and which moves lead to them. Layouts and moves therefore
follow from the program: they are the same on all ranks, at any time and on any machine, and so are
the bits of the results. ``movement/speeds.py`` has the measured figures, and says what they decide.
"""

from __future__ import annotations

import torch

from .messages import Wire
from .model import MESSAGE_OPS, TENSOR_OPS, CostModel

_FULL_EFFICIENCY = ((1e-9, 1.0),)  # every product at the full rate
_UNLIMITED = 1 << 30  # ranks of one host: all ranks count as being on one host


def uniform_cost_model(
    device_type: str,
    *,
    latency: float,
    bandwidth: float,
    overhead: float,
    memory: float,
    python: float,
    flops: float,
) -> CostModel:
    """Return the cost model of a machine with equal links, whose matmuls all run at one rate.

    Args:
        device_type: "cpu" or "cuda".
        latency: seconds before the first byte of a message arrives.
        bandwidth: bytes per second that a rank sends.
        overhead: seconds to start one local copy, or one op.
        memory: bytes per second of a local copy, and of what an op reads and writes.
        python: seconds that a message in forward keeps Python busy, on top of its own time; 0 on
            CUDA, where kernel launches run ahead of the GPU.
        flops: operations per second in a matmul.
    """
    link = Wire(0.0, bandwidth)
    return CostModel(
        name=f"built-in {device_type}",
        device_type=device_type,
        ranks_per_host=_UNLIMITED,
        memory_bytes=float("inf"),
        peak_flops={torch.float32: flops},
        memory_bytes_per_s=memory,
        memory_fraction=1.0,
        inside=link,
        between=link,
        message_start_s=latency,
        launch_seconds=overhead,
        host_seconds=python / (MESSAGE_OPS["forward"] + TENSOR_OPS),
        efficiency=_FULL_EFFICIENCY,
        overlap=0.0,
    )


BUILT_IN = {
    # Orders of magnitude, which is all that ranking layouts and moves needs. Between two network
    # namespaces of an idle machine, sockets take 30 us for a small collective and reach 1.5 GB/s in
    # a large one; a core copies 10 GB/s and computes 50 GFLOP/s in matmuls. The Python time of a
    # message is that of 33 ops of 4.8 us.
    "cpu": uniform_cost_model(
        "cpu",
        latency=30e-6,
        bandwidth=1.5e9,
        overhead=2e-6,
        memory=10e9,
        python=160e-6,
        flops=5e10,
    ),
    # NCCL within an NVLink node takes 10 to 20 us and reaches 100 GB/s and more; a kernel starts in
    # about 5 us; HBM moves 2 TB/s and more; flops is half the peak of a data-centre GPU in two-byte
    # floats.
    "cuda": uniform_cost_model(
        "cuda",
        latency=15e-6,
        bandwidth=100e9,
        overhead=5e-6,
        memory=2e12,
        python=0.0,
        flops=3e14,
    ),
}
