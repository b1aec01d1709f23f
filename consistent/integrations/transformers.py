"""transformers: the ``Trainer`` on global tensors.

```
trainer = Trainer(model=model, args=args, train_dataset=data, placement=placement, plan="zero3")
trainer.train()
```

Every rank runs the Trainer as one process would: batch sizes, steps, losses and metrics are those
of one device, and its files those of one process, which load on any number of ranks or without
this library. A Trainer of your own: ``class MyTrainer(GlobalTensors, TheirTrainer)``.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ..checkpoint.agreement import from_first
from ..data.padding import Pad
from ..dispatch.plans.shards import is_global
from ..elastic import Job
from ..nn.parallelize import parallelize
from ..spec import B, Placement, S, SbpLike, as_nd_sbp
from ..tensor.making.create import distribute
from .accelerate import Accelerator, as_one_process
from .spread import Spread
from .trainer_state import Kept
from .whole import whole, whole_on_first

_KEPT = "the last step"  # where a Trainer takes the name of a checkpoint


class GlobalTensors:
    """What a Trainer does otherwise.

    Args:
        args, options: of ``transformers.Trainer``.
        placement, plan: as of ``consistent.parallelize``; without a placement all ranks, on CPU.
        sbp: of the batches; without it S(0) on the first axis.
        whole: every rank reads and collates the batch whole, which gives one process's batches
            whatever the collator does. False: each rank its part (``consistent.data.loader``).
        pad: with ``whole=False``, as of ``consistent.data.loader``; what it does not say, the
            tokenizer of the collator does.
        elastic: the job that ``consistent.elastic.run`` gives to the function which makes the
            Trainer: when a rank is lost, the Trainer that is made next goes on from the last step.
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
        self._kept = None if elastic is None else Kept(elastic)
        place = placement or Placement.all("cpu")
        entries = (S(0), *(B,) * (place.ndim - 1)) if sbp is None else as_nd_sbp(sbp)
        self._spread = Spread(place, plan, entries, whole, pad)
        super().__init__(*args, **options)
        model: Any = self.model  # type: ignore[attr-defined]
        if not any(map(is_global, model.parameters())):
            parallelize(model, place, plan)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, which then prepares global models and batches."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        made: Any = self.accelerator  # type: ignore[attr-defined]
        Accelerator.take_over(made, self._spread)

    def _init_training_state(self, max_steps: int, steps: int, *args: Any) -> tuple[int, int]:
        """The Trainer's own, or in an elastic job that of the last step: (epochs that are done,
        batches that are done of the next one)."""
        found = super()._init_training_state(max_steps, steps, *args)  # type: ignore[misc]
        if self._kept is None:
            return found
        it: Any = self
        it.create_optimizer_and_scheduler(max_steps)
        self._kept.keep(self)
        if not self._kept.goes_on:
            return found
        epochs, _, trial = args
        it.state.init_training_references(self, max_steps, epochs, trial)
        done, left = divmod(it.state.global_step, steps)
        return done, left * it.args.gradient_accumulation_steps

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        """The Trainer's own; one that goes on reads no file."""
        prepare = super()._prepare_for_training  # type: ignore[misc]
        if self._kept is None:
            return prepare(max_steps, train_dataloader, resume)
        it: Any = self
        made, it._created_lr_scheduler = it._created_lr_scheduler, False  # or it makes another one
        found = prepare(max_steps, train_dataloader, None if self._kept.goes_on else resume)
        it._created_lr_scheduler = made
        return found

    def _run_epoch(
        self, model: Any, epoch: int, train_dataloader: Any, *args: Any, **options: Any
    ) -> Any:
        """The Trainer's own. One that goes on in the middle of an epoch reads the batches of the
        loader's samplers, which know the epoch from the loader."""
        train_dataloader.set_epoch(epoch)
        run = super()._run_epoch  # type: ignore[misc]
        if self._kept is None:
            return run(model, epoch, train_dataloader, *args, **options)
        self._kept.put_back_losses(self)
        if self._kept.goes_on:
            options["resume_from_checkpoint"] = _KEPT
        self._steps = options["num_update_steps_per_epoch"]
        run(model, epoch, train_dataloader, *args, **options)
        self._kept.commit(self)  # the last step of an epoch, with what follows it

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """The Trainer's own, after which a step is finished."""
        super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]
        state: Any = self.state  # type: ignore[attr-defined]
        if self._kept is not None and state.global_step % self._steps:
            self._kept.commit(self)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """The Trainer's own, of all steps."""
        if self._kept is not None:  # all steps may have been done before
            self._kept.put_back_losses(self)
        return super()._finalize_training(*args, **options)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        """The Trainer's own, or those of the last step."""
        if checkpoint is _KEPT and self._kept is not None:
            return self._kept.put_back_random()
        return super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _prepare_input(self, data: Any) -> Any:
        """Plain tensors, which every rank has whole, become global too."""
        if isinstance(data, torch.Tensor) and not is_global(data):
            ndim = data.ndim
            entries = [B if e.is_split and e.dim >= ndim else e for e in self._spread.sbp]  # type: ignore
            return distribute(data, self._spread.placement, entries)
        return super()._prepare_input(data)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model: Any = self.model  # type: ignore[attr-defined]
        found = whole_on_first(model.state_dict() if state_dict is None else state_dict)
        save = super()._save  # type: ignore[misc]
        from_first("Trainer: save the model", lambda: save(output_dir, state_dict=found))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        holder = _Saved(whole_on_first(optimizer.state_dict()))
        save = super()._save_optimizer_and_scheduler  # type: ignore[misc]
        self.optimizer = holder
        try:
            from_first("Trainer: save the optimizer", lambda: save(output_dir))
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        save = super()._save_rng_state  # type: ignore[misc]
        from_first("Trainer: save random states", lambda: save(output_dir))

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """The Trainer's own; metrics are computed of whole tensors."""
        return whole(super().prediction_step(*args, **options))  # type: ignore[misc]


class _Saved:
    """Stands for the optimizer while its whole state is written."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


class Trainer(GlobalTensors, transformers.Trainer):
    """``transformers.Trainer`` on global tensors; see ``GlobalTensors``."""


__all__ = ["GlobalTensors", "Trainer"]
