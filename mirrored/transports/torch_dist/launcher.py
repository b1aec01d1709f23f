"""How a process that a launcher started joins torch.distributed, and how it leaves."""

from __future__ import annotations

import atexit
import glob
import os
import time

import torch
import torch.distributed as dist


def init_from_environment() -> None:
    """Start the default process group, by what torchrun has put into the environment."""
    take_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(end_with_process, os.getpid())  # the process that starts it ends it


def take_gpu() -> None:
    """Let this process use the GPU of its number on this host, if there are GPUs."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def let_workers_finish() -> None:
    """Wait until gloo's threads sleep, for a second at most.

    They release the tensors of a collective after they have woken the thread that waits for it, and
    need the interpreter for that. A thread that asks for the interpreter while it shuts down ends
    the process with "terminate called without an active exception".
    """
    for _ in range(1000):
        time.sleep(0.001)  # meanwhile they can have the interpreter
        if "R" not in map(_state_of, glob.glob("/proc/self/task/*/stat")):
            return


def _state_of(path: str) -> str:
    """The state of a thread of gloo ("R": it runs, or waits for a core); "" for other threads."""
    try:
        with open(path) as file:
            name, _, rest = file.read().rpartition(")")
    except OSError:  # it has ended
        return ""
    return rest.split()[0] if "gloo" in name else ""


def end_with_process(rank_process: int) -> None:
    """Destroy the default process group, in the process that made it."""
    if dist.is_initialized() and os.getpid() == rank_process:
        dist.destroy_process_group()
