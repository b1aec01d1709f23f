"""Adapter for accelerate: an ``Accelerator`` that makes models and loaders global.

Parameters and batches become global tensors, whose shards are on the ranks.

```
accelerator = Accelerator(placement, "zero3")
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(...))
for batch in batches:                                   # the loop stays as it is
    loss = model(**batch).loss
    accelerator.backward(loss); optimizer.step()
```

To accelerate, each rank is the only process of a job: batch sizes, steps and metrics are those of
one device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, IterableDataset

from mirrored.transports.default import current

from .. import checkpoint
from ..checkpoint.agreement import from_rank_0
from ..data import Loader
from ..data.padding import Pad
from ..dispatch.plans.shards import is_global
from ..nn.parallelize import parallelize
from ..spec import Placement, SbpLike
from .spread import TrainingLayout
from .whole import whole


def as_one_process() -> PartialState:
    """Make accelerate and transformers treat this rank as the only process of a job.

    They then divide no batches and average no gradients themselves. Rank 0 remains the main
    process, which prints and writes. Returns accelerate's state object.
    """
    # All instances of PartialState share their attributes, so this changes those of the libraries.
    state = PartialState()
    state.distributed_type = DistributedType.NO
    state.num_processes = 1
    state.process_index = current().rank
    state.local_process_index = int(os.environ.get("LOCAL_RANK", current().rank))
    return state


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose models, optimizers and loaders hold global tensors.

    Args:
        placement, plan: the devices, and how parameters are laid out on them, as in
            ``consistent.parallelize``.
        sbp, whole, pad: the layout of batches (SBP: split, broadcast or partial sum for each mesh
            axis), and how they are read, as in ``consistent.data.loader``.
        options: arguments of ``accelerate.Accelerator``.
    """

    def __init__(
        self,
        placement: Placement,
        plan: Any = None,
        *,
        sbp: SbpLike | None = None,
        whole: bool = False,
        pad: Pad = None,
        **options: Any,
    ) -> None:
        as_one_process()
        super().__init__(**options)
        self._spread = TrainingLayout(placement, plan, sbp, whole, pad)

    @classmethod
    def take_over(cls, accelerator: accelerate.Accelerator, spread: TrainingLayout) -> None:
        """Turn an Accelerator that another library has made into one of this class, in place.

        The adapter of transformers' ``Trainer`` calls it. ``spread`` says how models and batches
        are laid out.
        """
        accelerator.__class__ = cls
        accelerator.__dict__["_spread"] = spread

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as accelerate does, with models and batches made global.

        An optimizer that was made with a model's plain parameters gets the model's global
        parameters instead.
        """
        models = [x for x in args if isinstance(x, torch.nn.Module)]
        old_parameters = [list(model.parameters()) for model in models]
        prepared = super().prepare(*args, device_placement=device_placement)
        # parallelize keeps the order of parameters, so old and new ones correspond by position.
        new_by_id = {
            id(a): b for m, old in zip(models, old_parameters) for a, b in zip(old, m.parameters())
        }
        for x in args:
            if isinstance(x, torch.optim.Optimizer):
                for group in x.param_groups:
                    group["params"] = [new_by_id.get(id(p), p) for p in group["params"]]
        return prepared

    def prepare_model(self, model: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        """Apply ``consistent.parallelize`` to the model, unless its parameters are global already.

        Then prepare it as accelerate does, for example with mixed precision.
        """
        if not any(is_global(x) for x in model.parameters()):
            parallelize(model, self._spread.placement, self._spread.plan)
        # Parallelize has put the shards on their devices; accelerate must not move them.
        options["device_placement"] = False
        return super().prepare_model(model, *args, **options)

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **options: Any) -> Any:
        """Return a loader of global batches with the data and order of ``data_loader``.

        It is made by ``consistent.data.loader``.
        """
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        shard = super().prepare_data_loader(data_loader, *args, **options)
        # accelerate has registered its own loader; the one made here takes its place.
        self._dataloaders.pop()
        prepared = PreparedLoader(
            self._spread.loader(_plain_loader(data_loader, shard, self._spread.whole))
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Return ``tensor`` with plain whole tensors in place of global ones, on every rank.

        Unlike in accelerate, nothing is concatenated over processes: a global tensor is one logical
        tensor.
        """
        return whole(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return ``input_data`` with plain whole tensors in place of global ones, on every rank.

        accelerate's own method then drops the items that only fill up the last batch.
        """
        return super().gather_for_metrics(whole(input_data), use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return ``tensor`` with plain whole tensors in place of global ones; nothing is reduced.

        A sum or mean of a global tensor is over all ranks already. ``reduction`` and ``scale`` are
        ignored.
        """
        return whole(tensor)

    def wait_for_everyone(self) -> None:
        """Block until all ranks have called this."""
        from_rank_0("accelerate: wait_for_everyone", lambda: None)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's state dict with whole plain tensors, on every rank. A collective."""
        return whole(super().get_state_dict(model, unwrap))

    def save_state(self, output_dir: str | None = None, **options: Any) -> str:  # type: ignore
        """Save all prepared objects by ``consistent.checkpoint.save`` and return its result.

        Each rank writes its shards. The folder is ``output_dir``, or else the project's, or the
        working folder.
        """
        return checkpoint.save(
            output_dir or self.project_dir or ".", keep=None, **self._prepared_objects()
        )

    def load_state(self, input_dir: str | None = None, **options: Any) -> None:  # type: ignore
        """Load all prepared objects by ``consistent.checkpoint.load``.

        The checkpoint may have been saved under another plan or number of ranks.
        """
        checkpoint.load(input_dir or self.project_dir or ".", **self._prepared_objects())

    def _prepared_objects(self) -> dict[str, Any]:
        kinds = {
            "model": self._models,
            "optimizer": [getattr(x, "optimizer", x) for x in self._optimizers],
            "scheduler": [getattr(x, "scheduler", x) for x in self._schedulers],
            "loader": self._dataloaders,
            "custom": self._custom_objects,
        }
        return {f"{kind}_{i}": x for kind, objects in kinds.items() for i, x in enumerate(objects)}


class PreparedLoader(DataLoaderStateMixin):
    """Loader of global batches, in the form that ``Accelerator.prepare`` returns.

    It wraps ``batches``, and tells accelerate the batch size and which batch is the last.
    """

    def __init__(self, batches: Loader) -> None:
        self.batches = batches
        self.gradient_state = GradientState()
        size = getattr(batches.batch_sampler, "batch_size", None) or batches.batch_size
        self.total_batch_size = size or 1
        self._drop_last = batches.drop_last

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # not set yet, as during unpickling: avoids endless recursion
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            last_number = None
            if not isinstance(self.dataset, IterableDataset):  # a stream does not know its end
                last_number = len(self) - -(
                    -self.batches.state_dict()["items"] // self.total_batch_size
                )
            for number, batch in enumerate(self.batches, 1):
                self.end_of_dataloader = number == last_number
                yield batch
        finally:
            self.end()


def _plain_loader(loader: DataLoader, shard: Any, reads_whole: bool) -> DataLoader:
    """Return a plain DataLoader of the data of ``loader``, in the order that accelerate has chosen.

    ``shard`` is the loader that accelerate has made from ``loader``. Only its batch sampler is
    used: it has an iteration of its own, which ``consistent.data.loader`` refuses. ``reads_whole``
    is whether each rank reads whole batches.
    """
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers",
        )
    }  # fmt: skip
    # A worker_init_fn may seed by rank, and for whole batches all ranks must draw the same.
    if not reads_whole:
        options["worker_init_fn"] = loader.worker_init_fn
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler
    else:
        options["batch_sampler"] = shard.batch_sampler
    return DataLoader(loader.dataset, **options)
