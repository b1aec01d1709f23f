"""Seeds as native ops and tensors hold them."""

from __future__ import annotations


def signed(seed: int) -> int:
    """A seed's 64 bits as torch's signed int: seeds reach up to 2^64."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
