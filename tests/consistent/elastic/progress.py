"""The file ``progress`` of a training: a line of each finished step, which a test waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.train_gpt import Log
from mirrored.transports.default import current


class Progress(Log):
    """Step, number of ranks, time and loss of each step, exactly once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "progress")

    def line(self, row: Sequence[Any]) -> str:
        """``row`` begins with the step and its loss."""
        step, loss, *_ = row
        return f"{step} {current().size} {time.time()} {loss}\n"
