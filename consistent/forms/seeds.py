"""Conversion of seeds to the signed integers that native ops and tensors hold."""

from __future__ import annotations


def signed_seed(seed: int) -> int:
    """Return the 64 bits of a seed as a signed integer: ``2**64 - 1 -> -1``.

    Seeds reach up to 2^64, and torch's ints only to 2^63.
    """
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
