"""Lines of a report: what one op did at one place of the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..drawing.words import short_site, times
from ..spec import TensorSpec


@dataclass(slots=True)
class Line:
    """What one op did at one call site: counts, layouts, redistributions (boxings) and bytes.

    A compiled step has a line for its call, and one for each source line inside the step that
    sends.

    Args:
        op, site: the op, and ``file:line`` of its call; "" in backward.
        count: number of calls.
        whole: whether it ran on gathered (replicated) inputs, although an operand was not B.
        layouts: layouts of operands and results as text -> number of calls.
        boxings: moves as text -> number of times.
        nbytes: bytes that the busiest rank sends.
        between: bytes that all ranks together send from host to host.
        compiled: whether the line is of a compiled step.
    """

    op: str
    site: str
    count: int = 0
    whole: bool = False
    layouts: Counter[str] = field(default_factory=Counter)
    boxings: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    between: int = 0  # bytes that all ranks together send from host to host
    compiled: bool = False

    @property
    def where(self) -> str:
        """The call site, such as ``model.py:40``; ``backward`` for a boxing in backward."""
        return short_site(self.site) or self.op


def sbps(specs: Sequence[TensorSpec]) -> str:
    """Return the SBPs of ``specs`` as text: ``S(0), B``, or ``(S(0), B), (B, B)`` on two axes."""
    return ", ".join(str(s.sbp[0] if len(s.sbp) == 1 else s.sbp) for s in specs)


def most_common(counts: Counter[str], most: int = 3) -> str:
    """Return the ``most`` most frequent keys of ``counts`` as text, and how many others there are.

    Example: ``3x S(0) -> B; B -> B; and 2 more``.
    """
    shown = "; ".join(times(*item) for item in counts.most_common(most))
    return shown + (f"; and {len(counts) - most} more" if len(counts) > most else "")
