"""How a process that a launcher started joins torch.distributed, and how it leaves."""

from __future__ import annotations

import atexit
import glob
import os
import time

import torch
import torch.distributed as dist


def started_by_launcher() -> bool:
    """Whether torchrun, or a launcher like it, started several processes."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and os.environ["WORLD_SIZE"] != "1"


def init_from_environment() -> None:
    """Under torchrun the environment says everything that initialising needs."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    atexit.register(_end)  # who starts it ends it


def let_workers_finish() -> None:
    """Wait until gloo's threads sleep.

    They drop the tensors of a collective after waking who waits for it, and need the interpreter
    for that. One that asks for it when it is going down ends the process with "terminate called
    without an active exception".
    """
    for _ in range(1000):
        time.sleep(0.001)  # the interpreter is theirs meanwhile
        if "R" not in map(_state_of, glob.glob("/proc/self/task/*/stat")):
            return


def _state_of(path: str) -> str:
    """That of a thread of gloo ("R": it runs, or would if it had a core); "" of another one."""
    try:
        with open(path) as file:
            name, _, rest = file.read().rpartition(")")
    except OSError:  # it has ended
        return ""
    return rest.split()[0] if "gloo" in name else ""


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
