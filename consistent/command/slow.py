"""Checks for settings and conditions that make this installation slow."""

from __future__ import annotations

import os

import torch

from mirrored.transports.default import current
from mirrored.transports.shared_memory.segments import SWITCH
from mirrored.transports.tuning import table

from ..doctor.machine import cores, crowded
from ..movement import check_mode

SLOW_MESSAGE_S = 200e-6  # ranks that share processors with nobody else take 4 to 20 us


def findings() -> list[str]:
    """Return a sentence for each setting that slows this process, with what to set instead.

    ``info`` prints them. Only this process is examined, not the other ranks.
    """
    found = [*_threads(), *_settings(), *_table()]
    if torch.version.cuda and not torch.cuda.is_available():
        found.append(
            f"torch is built for CUDA {torch.version.cuda} and sees no GPU: everything runs on the "
            "CPU. See nvidia-smi, and CUDA_VISIBLE_DEVICES."
        )
    return found


def _threads() -> list[str]:
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or current().size)
    found = crowded(here, torch.get_num_threads(), cores())
    return [] if found is None else [f"{found.said}. {found.cure}"]


def _table() -> list[str]:
    """Return a warning if the stored table of message timings was measured on a busy host.

    Ranks choose by this table how to move tensors, and would choose slower ways.
    """
    ranks = current().size
    kept = table.load(ranks, table.processors()) if ranks > 1 else None
    if kept is None or kept.latency_s < SLOW_MESSAGE_S:
        return []
    return [
        f"the table in {table.path(ranks, table.processors())} counts {kept.latency_s * 1e6:,.0f} "
        f"us for a message between {ranks} ranks of one host, where 4 are usual: other programs "
        f"ran while it was measured. Measure it again: torchrun --nproc_per_node {ranks} -m "
        "mirrored.transports.tuning."
    ]


def _settings() -> list[str]:
    found = []
    if check_mode.enabled:
        found.append(
            "CONSISTENT_CHECK=1: ranks compare notes before each boxing. Unset it once the program "
            "is right."
        )
    if os.environ.get(SWITCH, "1") == "0":
        found.append(
            f"{SWITCH}=0: ranks of one host send messages by TCP, about 30 us each, and not 4. "
            "Unset it."
        )
    if torch.is_anomaly_enabled():
        found.append("anomaly mode is on. Call torch.autograd.set_detect_anomaly(False).")
    for name, bad in (("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL")):
        if os.environ.get(name, "").upper() == bad:
            found.append(f"{name}={bad} makes each call wait or be checked. Unset it.")
    return found
