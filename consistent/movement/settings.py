"""What a process sets for itself and that changes what it computes: the same on all ranks, or their
results differ where each computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

_SETTINGS: dict[str, Callable[[], object]] = {
    "default dtype": torch.get_default_dtype,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "grad mode": torch.is_grad_enabled,
    "autocast on the CPU": lambda: _autocast("cpu"),
    "autocast on GPUs": lambda: _autocast("cuda"),
    "number of threads": torch.get_num_threads,
}
MAY_DIFFER = "number of threads"  # looked at last
"""Changes at most how sums are rounded, and hosts with other processors have other numbers."""


def settings() -> dict[str, str]:
    """The settings of this process, by name."""
    return {name: str(read()) for name, read in _SETTINGS.items()}


def _autocast(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"


def first_difference(notes: Sequence[Mapping[str, str]]) -> str | None:
    """The name of a setting that is not the same in all ranks' notes; None if all are."""
    names = dict.fromkeys(name for note in notes for name in note)
    return next((n for n in names if len({note.get(n) for note in notes}) > 1), None)
