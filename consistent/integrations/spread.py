"""Layout that an adapter gives to the model and batches of another library's training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ..data import Loader, loader
from ..data.padding import Pad
from ..spec import Placement, SbpLike


@dataclass(frozen=True)
class TrainingLayout:
    """How an adapter lays out the model and batches of another library's training loop.

    ``placement`` and ``plan`` are those of ``consistent.parallelize``; ``sbp``, ``whole`` and
    ``pad`` those of ``consistent.data.loader``.
    """

    placement: Placement
    plan: Any = None
    sbp: SbpLike | None = None
    whole: bool = False
    pad: Pad = None

    def loader(self, data_loader: DataLoader) -> Loader:
        """Return a loader of global batches with the data of the DataLoader ``data_loader``."""
        return loader(data_loader, self.placement, self.sbp, whole=self.whole, pad=self.pad)
