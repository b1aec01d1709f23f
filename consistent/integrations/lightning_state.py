"""Keeps the state of a Lightning ``Trainer`` from step to step of an elastic job.

After the loss of a rank a new Trainer continues from this state and that of the module.
"""

from __future__ import annotations

from typing import Any

import lightning

from ..checkpoint.contents.random_state import RandomState
from ..elastic import Job
from .whole import whole


class KeptLoops(lightning.Callback):
    """Callback that stores the state of a Trainer's loops, loaders and callbacks after each step.

    The state is stored in an elastic ``job``. If a rank is lost, training continues with a new
    Trainer, which gets that state from the job. This callback is the last one, so that at the end
    of a batch the other callbacks have run before it.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._random_states: dict[str, Any] = {}  # random states to restore before the first batch

    def keep(self, trainer: Any, model: Any) -> None:
        """Register the Trainer's objects with the elastic job, and restore its last step's state.

        At the start of the job there is no such state, and nothing is restored. A collective.
        """
        strategy = trainer.strategy
        schedulers = [each.scheduler for each in strategy.lr_scheduler_configs]
        values = self._job.keep(
            model=model,
            **{f"optimizer_{k}": x for k, x in enumerate(strategy.optimizers)},
            **{f"scheduler_{k}": x for k, x in enumerate(schedulers)},
        )
        if "loops" in values:
            self._random_states = RandomState().state_dict()
            trainer.fit_loop.load_state_dict(values["loops"])
            for each in trainer.callbacks:
                if each.state_key in values["callbacks"]:
                    each.load_state_dict(values["callbacks"][each.state_key])
        trainer.callbacks.append(self)

    def on_train_batch_start(self, *args: Any) -> None:
        """Restore the random state of the last step, before the first batch of a restored Trainer.

        ``keep`` has restored it before, but setting up the loaders has drawn random numbers since.
        """
        if self._random_states:
            RandomState().load_state_dict(self._random_states)
            self._random_states = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """End a step of the elastic job, which stores the Trainer's state after this batch.

        A collective.
        """
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        self._job.commit(
            loops=trainer.fit_loop.state_dict(),
            callbacks=whole({key: state for key, state in states.items() if state}),
        )
