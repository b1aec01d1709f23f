"""The layout that an adapter gives to the model and the batches of another library's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ..data import Loader, loader
from ..data.padding import Pad
from ..spec import Placement, SbpLike


@dataclass(frozen=True)
class Spread:
    """Arguments for the layout of a loop: ``placement`` and ``plan`` of ``consistent.parallelize``;
    ``sbp``, ``whole`` and ``pad`` of ``consistent.data.loader``."""

    placement: Placement
    plan: Any = None
    sbp: SbpLike | None = None
    whole: bool = False
    pad: Pad = None

    def loader(self, given: DataLoader) -> Loader:
        """Return a loader of global batches in place of a DataLoader."""
        return loader(given, self.placement, self.sbp, whole=self.whole, pad=self.pad)
