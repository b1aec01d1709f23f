"""The process group of a command: all ranks under torchrun, otherwise this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def ranks() -> Iterator[bool]:
    """Initialize torch.distributed inside the block, if torchrun has started this process.

    The context manager yields whether this process should print: it is rank 0, or alone.
    """
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if is_launched:
        if torch.cuda.is_available():
            torch.cuda.set_device(
                int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            )
            dist.init_process_group("cpu:gloo,cuda:nccl")
        else:
            dist.init_process_group("gloo")
    try:
        yield not dist.is_initialized() or dist.get_rank() == 0
    finally:
        if is_launched:
            dist.destroy_process_group()
