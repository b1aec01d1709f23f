"""``flow.config``: the number of devices on each machine that jobs use.

A job is a function decorated by ``global_function``, which runs on several devices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mirrored.transports.default import current

from ..spec import Placement


@dataclass
class _Config:
    type: str | None = None
    per_machine: int | None = None


_config = _Config()


def gpu_device_num(count: int) -> None:
    """Run jobs on the first ``count`` GPUs of each machine."""
    _set_devices("cuda", count)


def cpu_device_num(count: int) -> None:
    """Run jobs on the first ``count`` CPU ranks of each machine."""
    _set_devices("cpu", count)


def machine_num(count: int) -> None:
    """Check that the program was started on ``count`` machines, and raise an error if not.

    The launcher decides how many machines there are.
    """
    if count != machines():
        raise ValueError(
            f"config.machine_num: {count} machines are asked for, and the program runs on "
            f"{machines()}.\n"
            "  The launcher decides on how many.\n"
            f"  Start it on each machine with --nnodes={count} --node_rank=K."
        )


def reset() -> None:
    """Reset the settings: jobs use the default device type and number of devices again."""
    _config.type = _config.per_machine = None


def world_size() -> int:
    """Return the number of ranks in the world.

    Under a launcher the first call starts torch.distributed.
    """
    return current().size


def ranks_per_machine() -> int:
    """Return the number of ranks that the launcher started on each machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def machines() -> int:
    """Return the number of machines that the launcher started."""
    return world_size() // ranks_per_machine()


def devices() -> Placement:
    """Return the placement of jobs that choose none: the first ranks of each machine, on one axis.

    ``gpu_device_num`` and ``cpu_device_num`` set the device type and the number of ranks on each
    machine. By default these are "cuda" if there are GPUs, else "cpu", and all ranks.
    """
    machine_ranks = ranks_per_machine()
    count = _config.per_machine or machine_ranks
    ranks = [machine * machine_ranks + k for machine in range(machines()) for k in range(count)]
    kind = _config.type or ("cuda" if torch.cuda.is_available() else "cpu")
    return Placement(kind, range(len(ranks)) if count == machine_ranks else ranks)


def _set_devices(kind: str, count: int) -> None:
    name = "gpu" if kind == "cuda" else kind
    if count < 1 or count > ranks_per_machine():
        raise ValueError(
            f"config.{name}_device_num: {count} devices are asked for, and the program runs on "
            f"{ranks_per_machine()} ranks on each machine.\n"
            "  Each device is driven by one rank, which the launcher starts.\n"
            "  Start it with python -m consistent.flow.distributed.launch --nproc_per_node "
            f"{max(count, 1)}."
        )
    _config.type, _config.per_machine = kind, count
