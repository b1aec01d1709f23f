"""Measured speeds of the links between this world's ranks, and what follows from them.

They decide how large messages are and how many chunks they go in, which fusions a compiled step
makes, and which layouts a search picks that a program asks for. They never decide which layouts an
op gets or which moves lead there (``boxing/cost.py``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mirrored.comm import Link
from mirrored.transports.default import current

from ..boxing.cost import DEVICES, Device


def device_speeds(device_type: str) -> Device:
    """Return the speeds of a device type with the measured links between this world's ranks, the
    same on every rank. Where nothing was measured they are the built-in numbers."""
    found = current().link(device_type)
    return DEVICES[device_type] if found is None else speeds_of(device_type, found)


@lru_cache
def speeds_of(device_type: str, link: Link) -> Device:
    """Return the speeds of a device type with those of ``link`` for its messages and copies."""
    known = DEVICES[device_type]
    return replace(
        known,
        latency=link.latency_s,
        bandwidth=link.bytes_per_s,
        overhead=known.overhead if link.copy_start_s is None else link.copy_start_s,
        memory=known.memory if link.copy_bytes_per_s is None else link.copy_bytes_per_s,
    )


def start_bytes(device_type: str) -> int:
    """Return the bytes that a rank could send in the time for which one more communication keeps it
    busy."""
    device = device_speeds(device_type)
    return int((device.latency + device.python) * device.bandwidth)
