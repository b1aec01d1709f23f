"""Adapter for transformers: a ``Trainer`` that trains on global tensors, sharded over the ranks.

```
trainer = Trainer(model=model, args=args, train_dataset=data, placement=placement, plan="zero3")
trainer.train()
```

Every rank runs the Trainer as one process would: batch sizes, steps, losses and metrics are those
of one device. Its files are those of one process, and load on any number of ranks or without this
library. For another Trainer class write ``class MyTrainer(GlobalTensors, TheirTrainer)``.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ..checkpoint.agreement import from_rank_0
from ..data.padding import Pad
from ..dispatch.plans.shards import is_global
from ..elastic import Job
from ..nn.parallelize import parallelize
from ..spec import B, Placement, S, SbpLike, as_nd_sbp
from ..tensor.making.create import distribute
from .accelerate import Accelerator, as_one_process
from .spread import TrainingLayout
from .trainer_state import KeptTrainer
from .whole import gather_on_first, whole

# Passed for a checkpoint's path, to mean the elastic job's last step; compared by identity.
_LAST_STEP = "the last step"


class GlobalTensors:
    """Mixin that makes a ``transformers.Trainer`` class train on global tensors.

    Args:
        args, options: arguments of ``transformers.Trainer``.
        placement, plan: the devices, and how parameters are laid out on them, as in
            ``consistent.parallelize``; by default all ranks, on CPU.
        sbp: the layout of the batches, one entry for each mesh axis; by default S(0) (sharded along
            dim 0) on the first axis and B (replicated) on the others.
        whole: every rank reads and collates the whole batch, which gives the batches of one process
            whatever the collator does. False: each rank reads its part
            (``consistent.data.loader``).
        pad: with ``whole=False``, the padding of batches, as in ``consistent.data.loader``; values
            that it lacks are taken from the tokenizer of the collator.
        elastic: the job that ``consistent.elastic.run`` passes to the function that makes the
            Trainer. With it training survives the loss of a rank: the Trainer that is made next
            continues after the last step.
    """

    def __init__(
        self,
        *args: Any,
        placement: Placement | None = None,
        plan: Any = None,
        sbp: SbpLike | None = None,
        whole: bool = True,
        pad: Pad = None,
        elastic: Job | None = None,
        **options: Any,
    ) -> None:
        as_one_process()
        self._elastic_state = None if elastic is None else KeptTrainer(elastic)
        place = placement or Placement.all("cpu")
        entries = (S(0), *(B,) * (place.ndim - 1)) if sbp is None else as_nd_sbp(sbp)
        self._spread = TrainingLayout(place, plan, entries, whole, pad)
        super().__init__(*args, **options)
        model: Any = self.model  # type: ignore[attr-defined]
        if not any(map(is_global, model.parameters())):
            parallelize(model, place, plan)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, and make it prepare global models and batches."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        Accelerator.take_over(accelerator, self._spread)

    def _init_training_state(self, max_steps: int, steps: int, *args: Any) -> tuple[int, int]:
        """Return (finished epochs, finished batches of the next epoch), at which training begins.

        It replaces the Trainer's method, which is called at the start of training. In an elastic
        job with a finished step it also restores the Trainer's state after that step.
        """
        result = super()._init_training_state(max_steps, steps, *args)  # type: ignore[misc]
        if self._elastic_state is None:
            return result
        trainer: Any = self
        trainer.create_optimizer_and_scheduler(max_steps)
        self._elastic_state.keep(self)
        if not self._elastic_state.goes_on:
            return result
        epochs, _, trial = args
        trainer.state.init_training_references(self, max_steps, epochs, trial)
        finished_epochs, steps_done = divmod(trainer.state.global_step, steps)
        return finished_epochs, steps_done * trainer.args.gradient_accumulation_steps

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        """Prepare as the Trainer does, but read no checkpoint if the job restored the state.

        ``resume`` is the checkpoint to continue from. An elastic job (``elastic``) restores the
        last step's state itself.
        """
        prepare = super()._prepare_for_training  # type: ignore[misc]
        if self._elastic_state is None:
            return prepare(max_steps, train_dataloader, resume)
        trainer: Any = self
        # Else the Trainer would replace the scheduler, whose state has been restored already.
        created, trainer._created_lr_scheduler = trainer._created_lr_scheduler, False
        result = prepare(
            max_steps, train_dataloader, None if self._elastic_state.goes_on else resume
        )
        trainer._created_lr_scheduler = created
        return result

    def _run_epoch(
        self, model: Any, epoch: int, train_dataloader: Any, *args: Any, **options: Any
    ) -> Any:
        """Run an epoch as the Trainer does, and keep the state in an elastic job.

        The loader is told the epoch first, because the order of its samplers depends on it, and a
        Trainer that continues within an epoch needs the same batches.
        """
        train_dataloader.set_epoch(epoch)
        run = super()._run_epoch  # type: ignore[misc]
        if self._elastic_state is None:
            return run(model, epoch, train_dataloader, *args, **options)
        self._elastic_state.restore_losses(self)
        if self._elastic_state.goes_on:
            options["resume_from_checkpoint"] = _LAST_STEP
        self._steps_per_epoch = options["num_update_steps_per_epoch"]
        run(model, epoch, train_dataloader, *args, **options)
        # Ends the last step of the epoch, after its logs and evaluation.
        self._elastic_state.commit(self)

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Log, save and evaluate as the Trainer does, and then end the step of an elastic job."""
        super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]
        state: Any = self.state  # type: ignore[attr-defined]
        # The last step of an epoch is committed in _run_epoch.
        if self._elastic_state is not None and state.global_step % self._steps_per_epoch:
            self._elastic_state.commit(self)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Finalize as the Trainer does, with the losses of all steps since the job began.

        If all steps were finished before a rank was lost, no epoch is run again, and the losses
        are restored here.
        """
        if self._elastic_state is not None:  # no epoch ran if all steps had been finished before
            self._elastic_state.restore_losses(self)
        return super()._finalize_training(*args, **options)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Restore the random states of a checkpoint, or of the last step of an elastic job."""
        if checkpoint is _LAST_STEP and self._elastic_state is not None:
            return self._elastic_state.restore_random()
        return super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _prepare_input(self, data: Any) -> Any:
        """Prepare an input as the Trainer does, and distribute plain tensors as the batches are.

        Every rank must have the whole plain tensor.
        """
        if isinstance(data, torch.Tensor) and not is_global(data):
            ndim = data.ndim
            entries = [B if e.is_split and e.dim >= ndim else e for e in self._spread.sbp]  # type: ignore
            return distribute(data, self._spread.placement, entries)
        return super()._prepare_input(data)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model: Any = self.model  # type: ignore[attr-defined]
        # A collective, so all ranks run it before rank 0 alone writes.
        whole_state = gather_on_first(model.state_dict() if state_dict is None else state_dict)
        save = super()._save  # type: ignore[misc]
        from_rank_0("Trainer: save the model", lambda: save(output_dir, state_dict=whole_state))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        holder = _StateHolder(gather_on_first(optimizer.state_dict()))
        save = super()._save_optimizer_and_scheduler  # type: ignore[misc]
        # The Trainer writes what ``self.optimizer.state_dict()`` returns.
        self.optimizer = holder
        try:
            from_rank_0("Trainer: save the optimizer", lambda: save(output_dir))
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        save = super()._save_rng_state  # type: ignore[misc]
        from_rank_0("Trainer: save random states", lambda: save(output_dir))

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Run a prediction step as the Trainer does, and return whole tensors for the metrics."""
        return whole(super().prediction_step(*args, **options))  # type: ignore[misc]


class _StateHolder:
    """Object whose ``state_dict()`` is ``state``; it replaces the Trainer's optimizer for a save.

    The Trainer writes ``self.optimizer.state_dict()``, and should write the unsharded state.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


class Trainer(GlobalTensors, transformers.Trainer):
    """``transformers.Trainer`` on global tensors; see ``GlobalTensors``."""


__all__ = ["GlobalTensors", "Trainer"]
