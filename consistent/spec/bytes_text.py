"""Text of byte counts, for people to read."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Return a byte count as text: ``1536`` as ``1.5 KiB``.

    The text has at most four digits, and 1,024 of each unit make one of the next.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
