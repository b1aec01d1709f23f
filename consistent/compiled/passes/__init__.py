"""What is changed in a recorded graph before it is run: one idea a file.

A pass takes a ``Trace`` and changes its graph. What it decides follows from the graph and the
messages in it, which are alike on all ranks; ranks compare what is left before they use it.
"""

from __future__ import annotations

from collections.abc import Callable

from .merge_equal import merge_equal
from .sum_first import sum_first
from .trace import Saved, Trace
from .undo import undo

PASSES: tuple[Callable[[Trace], None], ...] = (undo, merge_equal, sum_first)

__all__ = ["PASSES", "Saved", "Trace"]
