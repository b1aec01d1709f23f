"""Keeps the state of a transformers ``Trainer`` from step to step of an elastic job.

After the loss of a rank a new Trainer continues from this state and that of model, optimizer and
scheduler.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from ..checkpoint.contents.random_state import RandomState
from ..elastic import Job
from .whole import whole


class KeptTrainer:
    """Keeper of a Trainer's state (position, losses, callbacks) in an elastic ``job``.

    It stores the state after each step. If a rank is lost, training continues with a new Trainer,
    which gets that state.

    Attributes:
        goes_on: whether this Trainer continues after a step that an earlier Trainer has finished.
    """

    def __init__(self, job: Job) -> None:
        self.goes_on = False
        self._job, self._committed_step = job, 0
        self._losses: dict[str, Any] = {}  # sums of losses to restore once the Trainer has begun
        self._random_states: dict[str, Any] = {}

    def keep(self, trainer: Any) -> None:
        """Register the Trainer's objects with the elastic job, and restore its last step's state.

        At the start of the job there is no such state, and nothing is restored. A collective.
        """
        values = self._job.keep(
            model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler
        )
        self._random_states = RandomState().state_dict()
        if "state" not in values:
            return
        self.goes_on = True
        self._losses = json.loads(values["losses"])
        trainer.state = TrainerState(**json.loads(values["state"]))
        # The Trainer restores callbacks only with this option.
        previous = trainer.args.restore_callback_states_from_checkpoint
        trainer.args.restore_callback_states_from_checkpoint = True
        trainer._load_callback_state()
        trainer.args.restore_callback_states_from_checkpoint = previous
        self._committed_step = trainer.state.global_step

    def restore_random(self) -> None:
        """Restore the random state of the last step.

        Call this before the first batch: ``keep`` has restored the state before, but preparing the
        data has drawn random numbers since.
        """
        RandomState().load_state_dict(self._random_states)

    def restore_losses(self, trainer: Any) -> None:
        """Restore the losses that were summed since the Trainer last logged.

        Call this once the Trainer has begun to train, because that resets these losses.
        """
        losses, self._losses = self._losses, {}
        if losses:
            trainer._tr_loss = torch.tensor(losses.pop("_tr_loss"), device=trainer.args.device)
            for name, value in losses.items():
                setattr(trainer, name, value)

    def commit(self, trainer: Any) -> None:
        """End a step of the elastic job, which stores the Trainer's state. A collective.

        Does nothing if the Trainer has not finished a step since the last call.
        """
        if trainer.state.global_step == self._committed_step:
            return
        self._committed_step = trainer.state.global_step
        trainer.state.stateful_callbacks = _callback_states(trainer)
        losses = {
            "_tr_loss": float(whole(trainer._tr_loss)),
            "_total_loss_scalar": trainer._total_loss_scalar,
            "_globalstep_last_logged": trainer._globalstep_last_logged,
            "_initial_global_step": trainer._initial_global_step,
        }
        state = json.dumps(dataclasses.asdict(trainer.state))
        self._job.commit(state=state, losses=json.dumps(losses))


def _callback_states(trainer: Any) -> dict[str, Any]:
    """Return the states of the Trainer's callbacks and control, by class name.

    This is the form in which the Trainer's checkpoints have them. For a class with several
    callbacks it is a list of states.
    """
    states_by_class: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states_by_class.setdefault(type(callback).__name__, []).append(callback.state())
    return {
        name: states if len(states) > 1 else states[0] for name, states in states_by_class.items()
    }
