"""What machine the figures are of: python -m tests.gpu.machine. It needs no native code of ours."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator

import torch
import torch.cuda.nccl


def lines() -> Iterator[str]:
    """One for the host, one for each GPU."""
    cuda = torch.version.cuda or "no CUDA"
    nvcc = shutil.which("nvcc") or "no nvcc"
    yield f"Python {platform.python_version()}, {os.cpu_count()} cores, {nvcc}"
    for k in range(torch.cuda.device_count()):
        yield f"GPU {k}: {_gpu(k)}"
    count = torch.cuda.device_count()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else "none"
    names = ", ".join(sorted({torch.cuda.get_device_name(k) for k in range(count)})) or "no GPU"
    yield f"torch {torch.__version__}, CUDA {cuda}, NCCL {nccl}, {count} x {names}"


def _gpu(k: int) -> str:
    found = torch.cuda.get_device_properties(k)
    others = [j for j in range(torch.cuda.device_count()) if j != k]
    peers = [j for j in others if torch.cuda.can_device_access_peer(k, j)]
    return (
        f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory >> 20} MB, "
        f"{found.multi_processor_count} multiprocessors, "
        f"{getattr(found, 'shared_memory_per_block_optin', 0) >> 10} KB for a block, "
        f"reads GPUs {peers or 'none'}"
    )


if __name__ == "__main__":
    print(*lines(), sep="\n")
