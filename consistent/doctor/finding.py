"""Result of a check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report. Without a ``cure`` all is well. With ``optional`` there is a cure,
    but the finding does not count in the exit status."""

    said: str
    cure: str = ""
    optional: bool = False

    @property
    def is_to_do(self) -> bool:
        return bool(self.cure) and not self.optional


def bytes_text(n: float) -> str:
    """Return a number of bytes as text, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"
