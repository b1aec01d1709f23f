"""Process groups for scripts that also run without a launcher."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def start(device: str) -> None:
    """Start the process group that a launcher describes, or one of this process alone."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch sees no GPU here; leave the option out.")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
