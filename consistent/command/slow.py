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
    sentences = [*_threads(), *_settings(), *_table_warning()]
    if torch.version.cuda and not torch.cuda.is_available():
        sentences.append(
            f"torch is built for CUDA {torch.version.cuda} and sees no GPU: everything runs on the "
            "CPU. See nvidia-smi, and CUDA_VISIBLE_DEVICES."
        )
    return sentences


def _threads() -> list[str]:
    rank_count = int(os.environ.get("LOCAL_WORLD_SIZE") or current().size)
    finding = crowded(rank_count, torch.get_num_threads(), cores())
    return [] if finding is None else [f"{finding.said}. {finding.cure}"]


def _table_warning() -> list[str]:
    """Return a warning if the stored table of message timings was measured on a busy host.

    Ranks choose by this table how to move tensors, and would choose slower ways.
    """
    ranks = current().size
    stored = table.load(ranks, table.cpu_device_name()) if ranks > 1 else None
    if stored is None or stored.latency_s < SLOW_MESSAGE_S:
        return []
    return [
        f"the table in {table.path(ranks, table.cpu_device_name())} counts "
        f"{stored.latency_s * 1e6:,.0f} us for a message between {ranks} ranks of one host, where "
        "4 are usual: other programs ran while it was measured. Measure it again: torchrun "
        f"--nproc_per_node {ranks} -m mirrored.transports.tuning."
    ]


def _settings() -> list[str]:
    sentences = []
    if check_mode.enabled:
        sentences.append(
            "CONSISTENT_CHECK=1: ranks compare notes before each boxing. Unset it once the program "
            "is right."
        )
    if os.environ.get(SWITCH, "1") == "0":
        sentences.append(
            f"{SWITCH}=0: ranks of one host send messages by TCP, about 30 us each, and not 4. "
            "Unset it."
        )
    if torch.is_anomaly_enabled():
        sentences.append("anomaly mode is on. Call torch.autograd.set_detect_anomaly(False).")
    for name, slow_value in (("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL")):
        if os.environ.get(name, "").upper() == slow_value:
            sentences.append(f"{name}={slow_value} makes each call wait or be checked. Unset it.")
    return sentences
