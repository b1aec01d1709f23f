"""Settings of torch in this process that change what it computes, such as autocast.

They must be the same on all ranks, or results differ between ranks that compute the same; check
mode compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

_SETTINGS: dict[str, Callable[[], object]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "grad mode": torch.is_grad_enabled,
    "autocast on the CPU": lambda: _autocast_dtype("cpu"),
    "autocast on GPUs": lambda: _autocast_dtype("cuda"),
    "number of threads": torch.get_num_threads,
}
MAY_DIFFER = "number of threads"  # last in _SETTINGS, so that other differences are found first
"""Affects at most the rounding of sums, and differs between hosts with different processors."""


def settings() -> dict[str, str]:
    """Return the value of each setting of this process as text, such as {"grad mode": "True"}."""
    return {name: str(read()) for name, read in _SETTINGS.items()}


def _autocast_dtype(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"


def first_difference(notes: Sequence[Mapping[str, str]]) -> str | None:
    """Return the name of the first setting that differs between ranks, or None.

    ``notes`` are the dicts of ``settings()`` of the ranks.
    """
    names = dict.fromkeys(name for note in notes for name in note)
    return next((n for n in names if len({note.get(n) for note in notes}) > 1), None)
