"""Validation of a machine's figures; each error names the wrong figure in one sentence."""

from __future__ import annotations

import math
from typing import Any

import torch

POSITIVE = ("ranks_per_host", "memory_bytes", "memory_bytes_per_s")
NOT_NEGATIVE = ("message_start_s", "launch_seconds", "host_seconds")
DEVICE_TYPES = ("cpu", "cuda")


def check_machine(machine: Any) -> None:
    """Raise a ValueError that names the first wrong figure of ``machine``, if there is one."""
    where = f"machine {machine.name!r}"
    if machine.device_type not in DEVICE_TYPES:
        raise ValueError(
            f"{where}: device_type is {machine.device_type!r}; it must be cpu or cuda."
        )
    for name in POSITIVE:
        check_positive(where, name, getattr(machine, name))
    if not isinstance(machine.ranks_per_host, int):
        raise ValueError(f"{where}: ranks_per_host is {machine.ranks_per_host!r}, no whole number.")
    for name in NOT_NEGATIVE:
        check_not_negative(where, name, getattr(machine, name))
    _check_fraction(where, "memory_fraction", machine.memory_fraction)
    check_not_negative(where, "overlap", machine.overlap)
    if machine.overlap > 1:
        raise ValueError(f"{where}: overlap is {machine.overlap!r}; it is a fraction, 1 at most.")
    _check_links(where, machine)
    _check_products(where, machine)


def _check_links(where: str, machine: Any) -> None:
    for side in ("inside", "between"):
        wire = getattr(machine, side)
        check_not_negative(where, f"{side}.latency_s", wire.latency_s)
        check_positive(where, f"{side}.bytes_per_s", wire.bytes_per_s)


def _check_products(where: str, machine: Any) -> None:
    if not machine.peak_flops:
        raise ValueError(f"{where}: peak_flops is empty; it must name one dtype at least.")
    for dtype, rate in machine.peak_flops.items():
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{where}: peak_flops has {dtype!r}, which is not a dtype.")
        check_positive(where, f"peak_flops of {dtype}", rate)
    if not machine.efficiency:
        raise ValueError(f"{where}: efficiency is empty; it must have one point at least.")
    for seconds, fraction in machine.efficiency:
        check_positive(where, "seconds of a point of efficiency", seconds)
        _check_fraction(where, "fraction of a point of efficiency", fraction)
    points = [seconds for seconds, _ in machine.efficiency]
    if sorted(set(points)) != points:
        raise ValueError(f"{where}: the points of efficiency must be in order of rising seconds.")
    product_seconds = [seconds / fraction for seconds, fraction in machine.efficiency]
    if sorted(product_seconds) != product_seconds:
        raise ValueError(f"{where}: by its points of efficiency a longer product takes less time.")


def check_positive(where: str, name: str, value: Any) -> None:
    """Raise a ValueError unless ``value`` is a finite number above 0.

    ``where`` and ``name`` are the machine and the figure as the message names them.
    """
    _check_number(where, name, value)
    if value <= 0:
        raise ValueError(f"{where}: {name} is {value!r}; it must be above 0.")


def check_not_negative(where: str, name: str, value: Any) -> None:
    """Raise a ValueError unless ``value`` is a finite number that is not below 0.

    ``where`` and ``name`` are the machine and the figure as the message names them.
    """
    _check_number(where, name, value)
    if value < 0:
        raise ValueError(f"{where}: {name} is {value!r}; it must not be negative.")


def _check_fraction(where: str, name: str, value: Any) -> None:
    check_positive(where, name, value)
    if value > 1:
        raise ValueError(f"{where}: {name} is {value!r}; it is a fraction, 1 at most.")


def _check_number(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{where}: {name} is {value!r}; it must be a finite number.")
