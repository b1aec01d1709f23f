"""Adapter for Lightning: a ``Strategy`` that trains on global tensors, sharded over the ranks.

```
trainer = lightning.Trainer(accelerator="cpu", strategy=GlobalStrategy(placement, "zero3"))
trainer.fit(module, DataLoader(...))
```

To Lightning, each rank is the only process of a job: batch sizes, steps and logged values are those
of one device, and its checkpoints those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ..checkpoint.agreement import from_rank_0
from ..data.padding import Pad
from ..dispatch.plans.shards import is_global
from ..elastic import Job
from ..nn.parallelize import parallelize
from ..spec import Placement, SbpLike
from .lightning_state import KeptLoops
from .spread import TrainingLayout
from .whole import whole


class GlobalStrategy(SingleDeviceStrategy):
    """Strategy for training on global tensors, passed to ``Trainer(strategy=...)``.

    Args:
        placement, plan: the devices, and how parameters are laid out on them, as in
            ``consistent.parallelize``.
        sbp, whole, pad: the layout of batches (SBP: split, broadcast or partial sum for each mesh
            axis), and how they are read, as in ``consistent.data.loader``.
        elastic: the job that ``consistent.elastic.run`` passes to the function that makes the
            Trainer. With it training survives the loss of a rank: the Trainer that is made next
            continues after the last step.
        options: arguments of Lightning's ``SingleDeviceStrategy``.
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
        self._spread = TrainingLayout(placement, plan, sbp, whole, pad)
        self._elastic_state = None if elastic is None else KeptLoops(elastic)
        self.global_rank = current().rank

    def setup(self, trainer: Any) -> None:
        """Set up the Trainer as Lightning does.

        In an elastic job also restore the state after the last step, if there was one.
        """
        super().setup(trainer)
        if self._elastic_state is not None and trainer.state.fn == "fit":
            self._elastic_state.keep(trainer, self.model)

    @property
    def is_global_zero(self) -> bool:
        """Return whether this rank prints and writes: rank 0."""
        return current().rank == 0

    def model_to_device(self) -> None:
        """Apply ``consistent.parallelize`` to the model, unless it is global already."""
        model: Any = self.model
        if not any(map(is_global, model.parameters())):
            parallelize(model, self._spread.placement, self._spread.plan)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader of global batches for a DataLoader; return any other object unchanged."""
        return self._spread.loader(dataloader) if isinstance(dataloader, DataLoader) else dataloader

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Return the batch unchanged: the loader has put its tensors on their devices."""
        return batch

    # -- between ranks -----------------------------------------------------------------------------

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Return ``tensor`` with plain whole tensors in place of global ones.

        Nothing is reduced: a sum or mean of a global tensor is over all ranks already.
        """
        return whole(tensor)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return ``tensor`` with plain whole tensors in place of global ones, on every rank."""
        return whole(tensor)

    def barrier(self, *args: Any, **options: Any) -> None:
        """Block until all ranks have called this."""
        from_rank_0("lightning: barrier", lambda: None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``obj`` on every rank."""
        return gather_from_ranks(obj if current().rank == src else None)[src]

    # -- checkpoints, as one process writes them ---------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with whole plain tensors. A collective."""
        return whole(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict with whole plain tensors. A collective."""
        return whole(super().optimizer_state(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the checkpoint on rank 0; the other ranks wait until it is written."""
        save = super().save_checkpoint
        # A callback keeps the best logged value, which is global.
        plain_checkpoint = whole(checkpoint)
        from_rank_0(
            f"lightning: save {filepath}", lambda: save(plain_checkpoint, filepath, storage_options)
        )
