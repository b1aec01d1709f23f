"""Findings: the results of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Result of a check, one line of the doctor's report.

    Attributes:
        said: what was found.
        cure: what the user can do about it; "" if all is well.
        optional: whether the cure need not be done; the finding does not count in the exit status.
    """

    said: str
    cure: str = ""
    optional: bool = False

    @property
    def is_to_do(self) -> bool:
        """True if the user has to do something, so that the exit status is not 0."""
        return bool(self.cure) and not self.optional


def bytes_text(n: float) -> str:
    """Return a number of bytes as text, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"
