"""lightning: a ``Strategy`` that trains on global tensors.

```
trainer = lightning.Trainer(accelerator="cpu", strategy=GlobalStrategy(placement, "zero3"))
trainer.fit(module, DataLoader(...))
```

To Lightning, each rank is the one process of a job: batch sizes, steps and logged values are those
of one device, and its checkpoints those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from mirrored.every_rank import gathered
from mirrored.transports.default import current

from ..checkpoint.agreement import from_first
from ..data.padding import Pad
from ..dispatch.plans.shards import is_global
from ..elastic import Job
from ..nn.parallelize import parallelize
from ..spec import Placement, SbpLike
from .lightning_state import Kept
from .spread import Spread
from .whole import whole


class GlobalStrategy(SingleDeviceStrategy):
    """``Trainer(strategy=GlobalStrategy(placement, plan))``.

    Args:
        placement, plan: as of ``consistent.parallelize``.
        sbp, whole, pad: as of ``consistent.data.loader``.
        elastic: the job that ``consistent.elastic.run`` gives to the function which makes the
            Trainer: when a rank is lost, the Trainer that is made next goes on from the last step.
        options: of Lightning's ``SingleDeviceStrategy``.
    """

    strategy_name = "consistent"

    def __init__(
        self,
        placement: Placement,
        plan: Any = None,
        *,
        sbp: SbpLike | None = None,
        whole: bool = False,
        pad: Pad = None,
        elastic: Job | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device=placement.type, **options)
        self._spread = Spread(placement, plan, sbp, whole, pad)
        self._kept = None if elastic is None else Kept(elastic)
        self.global_rank = current().rank

    def setup(self, trainer: Any) -> None:
        """Lightning's own; in an elastic job the state is then that of the last step."""
        super().setup(trainer)
        if self._kept is not None and trainer.state.fn == "fit":
            self._kept.keep(trainer, self.model)

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank prints and writes."""
        return current().rank == 0

    def model_to_device(self) -> None:
        """``consistent.parallelize``, once."""
        model: Any = self.model
        if not any(map(is_global, model.parameters())):
            parallelize(model, self._spread.placement, self._spread.plan)

    def process_dataloader(self, dataloader: object) -> object:
        """``consistent.data.loader``."""
        return self._spread.loader(dataloader) if isinstance(dataloader, DataLoader) else dataloader

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """The batch: the loader has laid it out."""
        return batch

    # -- between ranks -----------------------------------------------------------------------------

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """The logical value, whole: it is a sum or mean over all ranks already."""
        return whole(tensor)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The logical value, whole."""
        return whole(tensor)

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks."""
        from_first("lightning: barrier", lambda: None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank ``src`` has."""
        return gathered(obj if current().rank == src else None)[src]

    # -- checkpoints, as one process writes them ---------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole plain tensors. A collective."""
        return whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole plain tensors. A collective."""
        return whole(super().optimizer_state(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Rank 0 writes; no rank goes on before it is there."""
        save = super().save_checkpoint
        plain = whole(checkpoint)  # a callback keeps the best logged value, which is global
        from_first(f"lightning: save {filepath}", lambda: save(plain, filepath, storage_options))
