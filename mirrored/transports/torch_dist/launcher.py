"""Start and end of torch.distributed in a process that a launcher started."""

from __future__ import annotations

import atexit
import glob
import os
import time

import torch
import torch.distributed as dist


def init_from_environment() -> None:
    """Start the default process group from torchrun's environment variables."""
    select_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(destroy_group_of_process, os.getpid())  # the process that starts it ends it


def select_gpu() -> None:
    """Select the GPU whose index is this process's LOCAL_RANK, if there are GPUs."""
    if torch.cuda.is_available():
        # Modulo: if a host has more ranks than GPUs, several ranks share one.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def let_workers_finish() -> None:
    """Wait until gloo's threads sleep, for about a second at most.

    They release the tensors of a collective after they have woken the thread that waits for it, and
    need the GIL for that. A thread that asks for the GIL while the interpreter shuts down ends the
    process with "terminate called without an active exception".
    """
    for _ in range(1000):
        time.sleep(0.001)  # releases the GIL, so that they can take it
        if "R" not in map(_gloo_thread_state, glob.glob("/proc/self/task/*/stat")):
            return


def _gloo_thread_state(path: str) -> str:
    """Return the state of a thread, given its ``/proc/self/task/*/stat``; "" if it is not gloo's.

    "R" means that it runs, or waits for a core.
    """
    try:
        with open(path) as file:
            name, _, rest = file.read().rpartition(")")
    except OSError:  # it has ended
        return ""
    return rest.split()[0] if "gloo" in name else ""


def destroy_group_of_process(rank_process: int) -> None:
    """Destroy the default process group at the end of the process that made it.

    ``rank_process`` is the pid of that process. A forked child, which inherits the atexit function,
    has another one, and does nothing.
    """
    if dist.is_initialized() and os.getpid() == rank_process:
        dist.destroy_process_group()
