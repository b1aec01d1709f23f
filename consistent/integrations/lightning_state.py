"""The state of a Lightning ``Trainer`` besides its module, kept from step to step."""

from __future__ import annotations

from typing import Any

import lightning

from ..checkpoint.contents.random_state import RandomState
from ..elastic import Job
from .whole import whole


class Kept(lightning.Callback):
    """Callback that keeps the position of a Trainer for ``job``: the state of its loops, loaders
    and callbacks.

    It is the last callback, so that at the end of a batch the others have run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._random: dict[str, Any] = {}  # random states to restore before the first batch

    def keep(self, trainer: Any, model: Any) -> None:
        """Give the Trainer the state of the last step, or start to keep its state. A collective."""
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
        """Restore the random states after the last step: the draws since then were for the data."""
        if self._random:
            RandomState().load_state_dict(self._random)
            self._random = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """End a step of the elastic job with the end of a batch. A collective."""
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        self._job.commit(
            loops=trainer.fit_loop.state_dict(),
            callbacks=whole({key: state for key, state in states.items() if state}),
        )
