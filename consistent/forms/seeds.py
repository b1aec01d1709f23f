"""Conversion of seeds to the form that native ops and tensors hold."""

from __future__ import annotations


def signed(seed: int) -> int:
    """Return a seed's 64 bits as a signed integer. Seeds reach up to 2^64, and torch's ints do
    not."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
