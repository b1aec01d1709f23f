"""What a benchmark does just now, on the error stream; the other one is left to its table."""

from __future__ import annotations

import sys
import time


def doing(what: str) -> None:
    """Print ``what``, after the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)
