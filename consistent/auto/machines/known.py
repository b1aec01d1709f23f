"""Built-in machines, with figures from data sheets.

Some lines name another source, or say that a figure was measured:

* A100: "NVIDIA A100 Tensor Core GPU" data sheet: 312 TFLOP/s (bf16, fp16), 19.5 (fp32; fp64 by
  tensor cores), 40 GB at 1,555 GB/s or 80 GB at 2,039 GB/s, NVLink 600 GB/s for both directions.
* H100 SXM: "NVIDIA H100 Tensor Core GPU" data sheet: 989 (bf16, fp16), 67 (fp32; fp64 by tensor
  cores), 80 GB at 3.35 TB/s, NVLink 900 GB/s. H200 SXM: equal figures, except 141 GB at 4.8 TB/s.
  Data sheets give rates with sparsity, which are twice these.
* Hosts: DGX A100 has eight 200 Gb/s HDR cards for eight GPUs, DGX H100 and H200 eight 400 Gb/s NDR.
* NCCL reaches 0.8 of NVLink's rate: "protocol overhead (~20%)" (nccl-tests, issue 212), and 0.91 of
  InfiniBand's rate: 91 GB/s by four cards of 25 (nccl-tests, issue 100).
* Latencies are those by which NCCL itself chooses an algorithm (src/graph/tuning.cc, LL128): a hop
  of a ring takes 1.9 us by NVLink and 4 us by a network card; 7 us are spent for any message.
* Orders of magnitude, not from a source: ops reach 0.8 of the memory rate, torch takes 10 us of
  Python and dispatch for an op with gradients, and any kernel takes 5 us.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...cost_model.messages import Wire
from .machine import Machine

NVLINK_REACHED = 0.8
INFINIBAND_REACHED = 0.91

_AMPERE = {
    torch.bfloat16: 312e12,
    torch.float16: 312e12,
    torch.float32: 19.5e12,  # torch uses tf32 only if it is enabled
    torch.float64: 19.5e12,
}
_HOPPER = {
    torch.float8_e4m3fn: 1979e12,
    torch.float8_e5m2: 1979e12,
    torch.bfloat16: 989e12,
    torch.float16: 989e12,
    torch.float32: 67e12,
    torch.float64: 67e12,
}


def _gpu(
    peak_flops: dict[torch.dtype, float],
    memory: tuple[float, float],
    nvlink: float,
    infiniband: float,
) -> Callable[[str, int], Machine]:
    """Return a function of (name, ranks per host) that makes a machine with one kind of GPU.

    Args:
        peak_flops: dtype -> flop/s of matmuls.
        memory: (bytes, bytes per second).
        nvlink, infiniband: bytes per second in one direction, for each GPU.
    """

    def make(name: str, ranks_per_host: int) -> Machine:
        return Machine(
            name=name,
            device_type="cuda",
            ranks_per_host=ranks_per_host,
            memory_bytes=memory[0],
            peak_flops=peak_flops,
            memory_bytes_per_s=memory[1],
            memory_fraction=0.8,
            inside=Wire(1.9e-6, nvlink * NVLINK_REACHED),
            between=Wire(4e-6, infiniband * INFINIBAND_REACHED),
            message_start_s=7e-6,
            launch_seconds=5e-6,
            host_seconds=10e-6,
        )

    return make


_GPUS = {
    "a100": _gpu(_AMPERE, (80e9, 2039e9), 300e9, 25e9),
    "a100-40": _gpu(_AMPERE, (40e9, 1555e9), 300e9, 25e9),
    "h100": _gpu(_HOPPER, (80e9, 3350e9), 450e9, 50e9),
    "h200": _gpu(_HOPPER, (141e9, 4800e9), 450e9, 50e9),
}
# Name -> machine: a host with one GPU, and a host with eight.
KNOWN: dict[str, Machine] = {
    name: make(name, count)
    for gpu, make in _GPUS.items()
    for name, count in ((gpu, 1), (f"{gpu}-8", 8))
}
