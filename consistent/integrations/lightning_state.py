"""What a Lightning ``Trainer`` has beside its module, kept from step to step in a job that goes on
when ranks are lost."""

from __future__ import annotations

from typing import Any

import lightning

from ..checkpoint.contents.random_state import RandomState
from ..elastic import Job
from .whole import whole


class Kept(lightning.Callback):
    """Where a Trainer is, for ``job``: its loops, loaders and callbacks.

    It comes after all other callbacks, at the end of a batch.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._random: dict[str, Any] = {}  # once the state was put back

    def keep(self, trainer: Any, model: Any) -> None:
        """Give the Trainer the state of the last step, or begin to keep its own. A collective."""
        strategy = trainer.strategy
        schedulers = [each.scheduler for each in strategy.lr_scheduler_configs]
        values = self._job.keep(
            model=model,
            **{f"optimizer_{k}": x for k, x in enumerate(strategy.optimizers)},
            **{f"scheduler_{k}": x for k, x in enumerate(schedulers)},
        )
        if "loops" in values:
            self._random = RandomState().state_dict()
            trainer.fit_loop.load_state_dict(values["loops"])
            for each in trainer.callbacks:
                if each.state_key in values["callbacks"]:
                    each.load_state_dict(values["callbacks"][each.state_key])
        trainer.callbacks.append(self)

    def on_train_batch_start(self, *args: Any) -> None:
        """Random states are those after the last step: what was drawn since was for the data."""
        if self._random:
            RandomState().load_state_dict(self._random)
            self._random = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """The batch is finished. A collective."""
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        self._job.commit(
            loops=trainer.fit_loop.state_dict(),
            callbacks=whole({key: state for key, state in states.items() if state}),
        )
