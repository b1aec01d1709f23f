"""How an adapter lays out the model and the batches of another library's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ..data import Loader, loader
from ..data.padding import Pad
from ..spec import Placement, SbpLike


@dataclass(frozen=True)
class Spread:
    """``placement`` and ``plan`` of ``consistent.parallelize``; ``sbp``, ``whole`` and ``pad`` of
    ``consistent.data.loader``."""

    placement: Placement
    plan: Any = None
    sbp: SbpLike | None = None
    whole: bool = False
    pad: Pad = None

    def loader(self, given: DataLoader) -> Loader:
        """Batches of global tensors."""
        return loader(given, self.placement, self.sbp, whole=self.whole, pad=self.pad)
